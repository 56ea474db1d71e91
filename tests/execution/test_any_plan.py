"""Random plans of random workflows run, end, and compute what one device computes, concurrent ones too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from any_plan import alone, any_plans, decide, fake, features, outcome, random_workflow, with_several_devices
from plan_cases import parse
from threads import ThreadSession

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, Workflow

SEEDS = range(60)


@cache
def plans_of(seed: int) -> list[Plan]:
    return any_plans(random_workflow(seed), 3, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_computes_what_one_device_computes(seed: int) -> None:
    workflow = random_workflow(seed)
    expected = alone(workflow)
    plans = plans_of(seed)
    assert len(plans) >= 10
    for plan in plans:
        assert outcome(workflow, plan, SerialSession(20.0)) == expected, to_text(plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_whose_workers_have_several_devices_compute_the_same(seed: int) -> None:
    workflow = random_workflow(seed)
    several = with_several_devices(workflow, random.Random(seed))
    expected = alone(workflow)
    plans = any_plans(several, 4, seed, 20)
    assert len(plans) >= 10
    for plan in plans:
        assert outcome(several, plan, SerialSession(20.0)) == expected, to_text(plan)
    assert outcome(several, plans[0], ThreadSession(seed)) == expected, to_text(plans[0])


def test_the_plans_are_of_all_kinds() -> None:
    plans = [(random_workflow(seed), plan) for seed in SEEDS for plan in plans_of(seed)]
    given = [(work, plan, place) for work, plan in plans for place in plan.places().values() if place.blocks]
    assert sum(work.stages[place.stage].collective for work, _, place in given) >= 30
    assert sum(work.stages[place.stage].blocks_per_batch > 1 for work, _, place in given) >= 5
    assert sum(plan.item_of(place.stage).chunks > 1 for _, plan, place in given) >= 10
    fused = [plan.is_fused(work.loops["l"], work) for work, plan, place in given if place.stage == "env"]
    assert sum(fused) >= 5
    assert sum(not one for one in fused) >= 5
    assert sum(bool(plan.exclusive) for _, plan in plans) >= 200
    assert sum(any(item.chunks > 1 for item in plan.items) for _, plan in plans) >= 100
    assert {plan.kind(work) for work, plan in plans} == set(Kind)


def test_the_cases_cover_what_there_is() -> None:
    workflows = [random_workflow(seed) for seed in SEEDS]
    assert sum(bool(work.loops) for work in workflows) >= 20
    assert sum(bool(work.weight_edges) for work in workflows) >= 10
    assert sum(bool(work.loops and work.repeat) for work in workflows) >= 8
    assert sum(any(len(work.sources(stage)) > 1 for stage in work.stages) for work in workflows) >= 12  # two join
    again = [work for work in workflows if work.repeat]
    assert len(again) >= 16
    rounds = {n for work in again for it in alone(work) for n in it[f"{work.repeat.decided_by} rounds"].values()}
    assert rounds == {1, 2, 3}
    assert sum(spec.blocks_per_batch > 1 for work in workflows for spec in work.stages.values()) >= 10


@pytest.mark.ray
def test_real_workers_run_a_sample_of_them(ray_session) -> None:
    chosen = []
    for seed in SEEDS[::4]:
        plans = any_plans(random_workflow(seed), 2, seed, 20)
        chosen.append((seed, max(plans, key=lambda plan: (len(features(plan)), to_text(plan)))))
    assert set().union(*(features(plan) for _, plan in chosen)) >= {"chunks", "shards", "blocks", "exclusive"}
    for seed, plan in chosen:
        workflow = random_workflow(seed)
        assert outcome(workflow, plan, ray_session) == alone(workflow), (seed, to_text(plan))


CASES = (0, 1, 2, 3, 5, 6, 7, 8, 9, 11, 15, 20)


def workflow(names: str, edges: Sequence[tuple[str, str]], **more) -> Workflow:
    stages = {name: fake(name, number) for number, name in enumerate(names.split())}
    return Workflow("w", 4, stages, tuple(Edge(a, b, whole=False) for a, b in edges), **more)


def require_equal(work: Workflow, devices: int, most: int = 60) -> None:
    """Checks a sample of the plans, one process and threads by turns."""
    expected = alone(work)
    for number, plan in enumerate(any_plans(work, devices, 0, most)):
        session = ThreadSession(number, pause_s=0.0003) if number % 2 else SerialSession()
        assert outcome(work, plan, session) == expected, to_text(plan)
        session.close()


@pytest.mark.parametrize("seed", CASES)
def test_workers_that_pause_at_random_compute_what_one_device_computes(seed: int) -> None:
    work = random_workflow(seed)
    expected = alone(work)
    for plan in any_plans(work, 3, seed, 8):
        session = ThreadSession(seed)
        assert outcome(work, plan, session) == expected, to_text(plan)
        session.close()


def test_two_loops_are_repeated_together_until_the_second_has_enough() -> None:
    edges = (("a1", "o2"), ("a2", "last"), ("a1", "last"))
    loops = {"one": Loop("one", "o1", "a1", 2), "two": Loop("two", "o2", "a2", 2)}
    again = Repeat("again", "last", "o2", lambda rounds: replace(decide(rounds), enough=len(rounds) == 2), 3)
    work = workflow("o1 a1 o2 a2 last", edges, loops=loops)
    whole = replace(work.stages["last"], whole=True)
    work = replace(work, stages={**work.stages, "last": whole}, repeat=again)
    assert [it[f"{name} rounds"] for it in alone(work)[:1] for name in ("o1", "o2")] == [{0: 2}, {0: 2}]
    require_equal(work, 2)


def test_a_loop_opens_with_the_data_of_all_stages_before_it() -> None:
    edges = (("x", "env"), ("y", "env"), ("policy", "z"), ("x", "z"))
    work = workflow("x y env policy z", edges, loops={"l": Loop("l", "env", "policy", 2)})
    other = workflow("x y env policy z", (edges[1], edges[0], *edges[2:]), loops={"l": Loop("l", "env", "policy", 2)})
    without = workflow("x y env policy z", edges[1:], loops={"l": Loop("l", "env", "policy", 2)})
    values = [alone(w)[0]["env"] for w in (work, other, without)]
    assert values[0] != values[1] != values[2] != values[0]  # the order of the edges is that of the payloads
    require_equal(work, 3)


def test_data_for_the_answering_side_of_a_loop_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"policy takes data of \['x'\], but only the opener .* let the edge end at env"
    ):
        workflow("x env policy", (("x", "policy"),), loops={"l": Loop("l", "env", "policy", 2)})


def test_an_order_against_the_edges_is_refused() -> None:
    with pytest.raises(PlanError, match=r"has b before a, but edge a -> b requires the opposite: swap them"):
        parse("b on all > a on all", 1, workflow("a b", (("a", "b"),)))
