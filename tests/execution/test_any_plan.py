"""Random plans of random workflows run, end, and compute what one device computes."""

from __future__ import annotations

from functools import cache

import pytest
from any_plan import alone, any_plans, features, outcome, random_workflow

from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.runtime.session import SerialSession

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
