"""Loops of three stages, one of which takes part in every k-th chunk-step: planned, priced and explained."""

from __future__ import annotations

import random
from dataclasses import replace

import plan_cases as planning
import pytest

from experiments.bench.planner.every_plan import EveryPlan
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import Leaf, LoopNode, Plan
from rlinf_embodied.planning.planner import find_plans
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import Simulator, simulate
from rlinf_embodied.workflow.graph import Loop, Turn


def one(every: int, steps: int = 6, devices: int = 3, blocks: int = 2, **more: dict) -> Pricer:
    """env 2 s, high 5 s, low 1 s per turn of a shard; nothing behind the loop."""
    stages = {
        "env": planning.stage(2.0, 0.0, loop=True),
        "high": planning.stage(5.0, 0.0, loop=True),
        "low": planning.stage(1.0, 0.0, loop=True),
    }
    for name, extra in more.items():
        stages[name] |= extra
    loop = Loop("rollout", "env", "low", steps, between=(Turn("high", every),))
    work = planning.graph(tuple(stages), (), blocks, loops={"rollout": loop})
    return Pricer(work, planning.profile(stages), planning.cluster(devices))


def placed(*devices: int, shards: int = 1) -> LoopNode:
    return LoopNode(
        "rollout", tuple(Leaf(s, (d,)) for s, d in zip(("env", "high", "low"), devices, strict=True)), shards
    )


def test_the_stage_in_between_counts_in_its_own_chunk_steps_only() -> None:
    # six turns of 2 + 1 seconds, and 5 more in the first of every k
    for every, turns in ((1, 6), (2, 3), (4, 2), (9, 1)):
        pricer = one(every)
        for tree in (placed(0, 0, 0), placed(0, 1, 2), placed(0, 1, 1)):
            run = simulate(tree, pricer, traced=False)
            assert run.iteration_s == pytest.approx(6 * (2 + 1) + turns * 5)
            assert run.stages_s == pytest.approx({"env": 12.0, "high": 5.0 * turns, "low": 6.0})


def test_two_shards_hide_what_the_stage_in_between_takes() -> None:
    pricer = one(2, steps=4)
    # both shards: high 0-5 and 5-10; low, env of the first 5-6, 6-8; its second step 8-9, 9-11; high again 11-16 ...
    together, apart = (simulate(placed(*d, shards=2), pricer).iteration_s for d in ((0, 1, 1), (0, 1, 2)))
    assert apart < together < 2 * simulate(placed(0, 0, 0), pricer).iteration_s


@pytest.mark.parametrize("seed", range(40))
def test_whole_periods_that_take_alike_are_added_at_once(seed: int) -> None:
    pricer = planning.three_sided(seed)
    work = pricer.workflow
    loop = replace(work.loops["rollout"], chunk_steps=60 + seed % 7)
    longer = Pricer(replace(work, loops={"rollout": loop}), pricer.profile, pricer.cluster)
    tree = planning.wide_tree(longer, random.Random(seed))
    assert Simulator(longer).run(tree).iteration_s == pytest.approx(
        Simulator(longer).run(tree, traced=True).iteration_s
    )


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_no_plan_at_all_is_better_than_the_one_that_is_found(seed: int) -> None:
    """Of every placement of every stage, each with its own devices, on three devices at most."""
    pricer = planning.with_memory(planning.three_sided(seed, max_devices=3), 1e12)
    found = find_plans(pricer)[0]
    best = EveryPlan(pricer, most_simulated=20_000).best(found.iteration_s)
    assert best.complete
    assert best.tree is None, f"{best.seconds} s instead of {found.iteration_s}: {best.tree}"


def test_the_report_says_who_is_together() -> None:
    pricer = one(1, steps=20, blocks=6, high={"resident_bytes": 6e11}, env={"resident_bytes": 6e11})
    ranked, _ = rank(pricer)
    assert "rollout disaggregated env+low | high" in {entry.shape for entry in ranked} | {ranked[0].shape}
    assert all("collocated" not in entry.shape for entry in ranked)  # they do not fit together


def test_a_plan_places_all_stages_of_a_loop() -> None:
    pricer = one(2)
    two = {"loop": {"name": "rollout", "shards": 1, "stages": {"env": "all", "low": "all"}}}
    with pytest.raises(PlanError, match=r"must be placed exactly once; add \['high'\] to the stages of its loop"):
        resolve("mine", [{"tree": two}], 2, pricer.workflow)
    apart = {"temporal": [{"loop": two["loop"]}, {"leaf": {"stage": "high", "devices": "all"}}]}
    with pytest.raises(PlanError, match="loop rollout is made of env, high and low: place all"):
        resolve("mine", [{"tree": apart}], 2, pricer.workflow)
    three = Plan("p", 3, placed(0, 1, 2))
    assert resolve("p", [three.to_dict()], 3, pricer.workflow).tree == three.tree
