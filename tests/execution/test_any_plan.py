"""Every feasible plan tree of random workflows runs, ends, and computes what one device computes."""

from __future__ import annotations

import random

import pytest
from any_plan import alone, every_plan, features, outcome, random_workflow, with_shares

from rlinf_embodied.planning.plan import Plan, leaves
from rlinf_embodied.runtime.session import SerialSession

SEEDS = range(60)
MANY_PLANS = (5, 13, 28, 35, 40, 44, 52)  # and therefore long


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) if seed in MANY_PLANS else seed for seed in SEEDS]
)
def test_every_feasible_plan_computes_what_one_device_computes(seed: int) -> None:
    workflow = random_workflow(seed)
    expected = alone(workflow)
    plans = every_plan(workflow, 3)
    assert plans
    for plan in plans:
        assert outcome(workflow, plan, SerialSession(20.0)) == expected, plan.tree


def shared_plans(seed: int) -> list[Plan]:
    draw, workflow = random.Random(seed), random_workflow(seed)
    plans = every_plan(workflow, 3)
    chosen = draw.sample(plans, min(len(plans), 12))
    return [other for plan in chosen for other in with_shares(plan, workflow, draw)]


@pytest.mark.parametrize("seed", SEEDS)
def test_unlike_shares_compute_what_one_device_computes(seed: int) -> None:
    workflow = random_workflow(seed)
    expected = alone(workflow)
    for plan in shared_plans(seed):
        assert outcome(workflow, plan, SerialSession(20.0)) == expected, plan.tree


def test_the_shares_are_of_all_kinds() -> None:
    plans = [(random_workflow(seed), plan) for seed in SEEDS for plan in shared_plans(seed)]
    given = [(work, plan, leaf) for work, plan in plans for leaf in leaves(plan.tree) if leaf.shares]
    assert len(given) >= 200
    assert sum(work.stages[leaf.stage].collective for work, _, leaf in given) >= 30
    assert sum(work.stages[leaf.stage].blocks_per_batch > 1 for work, _, leaf in given) >= 5
    assert sum(bool(plan.granularity(leaf.stage)) for _, plan, leaf in given) >= 10  # chunk by chunk
    fused = [plan.shares_workers("l", work.num_blocks) for work, plan, leaf in given if leaf.stage == "env"]
    assert sum(fused) >= 5
    assert sum(not both for both in fused) >= 5
    assert any(len(set(leaf.shares)) > 1 for _, _, leaf in given)


def test_the_cases_cover_what_there_is() -> None:
    workflows = [random_workflow(seed) for seed in SEEDS]
    assert sum(bool(work.loops) for work in workflows) >= 20
    assert sum(bool(work.weight_edges) for work in workflows) >= 10
    assert sum(any(loop.decide for loop in work.loops.values()) for work in workflows) >= 8
    assert sum(any(len(work.sources(stage)) > 1 for stage in work.stages) for work in workflows) >= 12  # two join
    rounds = {len_ for work in workflows if work.loops for it in alone(work) for len_ in it["env rounds"].values()}
    assert rounds == {1, 2, 3}
    again = [work for work in workflows if work.repeat]
    assert len(again) >= 8
    rounds = {n for work in again for it in alone(work) for n in it[f"{work.repeat.decided_by} rounds"].values()}
    assert rounds == {1, 2, 3}
    assert sum(spec.blocks_per_batch > 1 for work in workflows for spec in work.stages.values()) >= 10


def sample() -> list[tuple[int, Plan]]:
    """A few plans per workflow, so that together they have every feature."""
    draw, chosen = random.Random(0), []
    for seed in SEEDS:
        plans = every_plan(random_workflow(seed), 2)
        rich = max(plans, key=lambda plan: (len(features(plan)), str(plan.tree)))
        chosen += [(seed, plan) for plan in {str(p.tree): p for p in (rich, draw.choice(plans))}.values()]
    return chosen


@pytest.mark.ray
def test_real_workers_run_a_sample_of_them(ray_session) -> None:
    chosen = sample()[::3]
    assert len(chosen) >= 36
    assert set().union(*(features(plan) for _, plan in chosen)) >= {"granularity", "resident", "'shards': 2", "spatial"}
    for seed, plan in chosen:
        workflow = random_workflow(seed)
        assert outcome(workflow, plan, ray_session) == alone(workflow), (seed, plan.tree)
