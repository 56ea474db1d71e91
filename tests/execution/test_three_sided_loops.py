"""Loops of three stages run: every plan computes what one device computes, in whatever way its calls are made."""

from __future__ import annotations

import random
from dataclasses import replace

import plan_cases as planning
import pytest
from any_plan import alone, every_plan, features, mixed, outcome, three_sided

from rlinf_embodied.execution.emulation import Emulator, num_calls
from rlinf_embodied.planning.plan import Leaf, LoopNode, Plan, leaves
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.workflow.graph import Loop, StageSpec, Turn, Workflow

SEEDS = range(16)
MOST = 60  # plans of each


def plans_of(seed: int) -> list[Plan]:
    plans = every_plan(three_sided(seed), 3)
    return plans if len(plans) <= MOST else random.Random(seed).sample(plans, MOST)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_computes_what_one_device_computes(seed: int) -> None:
    workflow = three_sided(seed)
    expected = alone(workflow)
    for plan in plans_of(seed):
        assert outcome(workflow, plan, SerialSession(20.0)) == expected, plan.tree


def test_the_plans_are_of_all_kinds() -> None:
    given = [plan for seed in SEEDS for plan in plans_of(seed)]
    places = [tuple(leaf.devices for leaf in node.stages) for plan in given for node in plan.loops().values()]
    assert sum(len(set(some)) == 1 for some in places) > 20  # one call per worker
    assert sum(some[1] == some[2] != some[0] for some in places) > 20  # relayed
    assert sum(some[0] == some[1] != some[2] for some in places) > 20
    assert sum(len(set(some)) == 3 for some in places) > 20


def by_hand(every: int, steps: int, rounds: int = 1) -> dict[int, int]:
    """What `env` of `plain` reports for each block, step by step."""
    value = lambda number, block, at, *parts: mixed(number, block, 0, 0, 0, *parts)  # noqa: E731
    found = {}
    for block in range(4):
        env, low, high, said = value(0, block, 0, 0), 0, 0, 0
        for step in range(steps):
            if step % every == 0:
                high = value(2, block, step, high, step, env)
                said = high
            low = value(1, block, step, low, step, env, said)
            env = value(0, block, step, env, step, low)
        found[block] = value(0, block, 0, env, 0)
    return found


def plain(every: int, steps: int) -> Workflow:
    specs = {
        name: StageSpec(name, "any_plan.Fake", {"name": name, "number": number, "collective": False, "ends": ()})
        for number, name in enumerate(("env", "low", "high"))
    }
    specs["high"] = replace(specs["high"], config={**specs["high"].config, "every": every})  # pyright: ignore[reportGeneralTypeIssues]
    loop = Loop("l", "env", "low", steps, between=(Turn("high", every),))
    return Workflow("plain", 4, specs, loops={"l": loop})


PLACES = {
    "in one place": ((0,), (0,), (0,)),
    "relayed": ((0,), (1,), (1,)),
    "the one in between with the opener": ((0,), (0,), (1,)),
    "all apart": ((0,), (2,), (1,)),
    "in several places": ((0, 1), (0, 2), (1, 2)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("every", "steps"), [(1, 3), (2, 5), (3, 4), (7, 2)])
def test_what_was_said_last_holds_until_the_next_turn(place: str, every: int, steps: int) -> None:
    workflow, (env, high, low) = plain(every, steps), PLACES[place]
    sides = tuple(Leaf(side, own) for side, own in zip(("env", "high", "low"), (env, high, low), strict=True))
    plan = Plan("p", 3, LoopNode("l", sides, 2))
    (found, _) = outcome(workflow, plan, SerialSession(20.0))
    assert found["env"] == by_hand(every, steps)


# ------------------------------------------------------------------------------------------------------------ emulation
@pytest.mark.parametrize("seed", range(30))
def test_a_plan_takes_what_its_simulation_says(seed: int) -> None:
    pricer = planning.with_memory(planning.three_sided(seed), 1e12)
    tree = planning.wide_tree(pricer, random.Random(seed))
    cluster = planning.replace_cluster(pricer.cluster, emulated=True)
    emulator = Emulator(Pricer(pricer.workflow, pricer.profile, cluster), SerialSession())
    plan = Plan("tree", cluster.num_devices, tree)
    assert emulator.run(plan, 1, 1e-12).due_s[0] == pytest.approx(simulate(tree, pricer).iteration_s, rel=1e-6)


def test_calls_are_counted_as_they_are_submitted() -> None:
    workflow = plain(2, 5)
    sides = (Leaf("env", (0,)), Leaf("high", (1,)), Leaf("low", (1, 2)))
    plan = Plan("p", 3, LoopNode("l", sides, 2))
    steps = 5 * 1 + 3 * 1 + 5 * 2  # of env, high and low in its two workers
    assert num_calls(plan, workflow, planning.cluster(3)) == 2 * (steps + 2 * (1 + 1 + 2))


@pytest.mark.ray
def test_real_workers_run_a_sample_of_them(ray_session) -> None:
    chosen = []
    for seed in (1, 4):
        plans = [plan for plan in plans_of(seed) if len({leaf.devices for leaf in leaves(plan.tree)}) > 1]
        chosen += [(seed, plan) for plan in sorted(plans, key=lambda plan: (-len(features(plan)), str(plan.tree)))[:3]]
    for seed, plan in chosen:
        assert outcome(three_sided(seed), plan, ray_session) == alone(three_sided(seed)), (seed, plan.tree)
