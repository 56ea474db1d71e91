"""Every feasible plan tree of random workflows runs, ends, and computes what one device computes."""

from __future__ import annotations

import random

import pytest
from any_plan import every_plan, features, random_workflow

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.flow.graph import Workflow
from rlinf_embodied.flow.plan import Plan
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import SerialSession, Session

ITERATIONS = 2  # the second one shows whether the weights arrived
SEEDS = range(60)


def outcome(workflow: Workflow, plan: Plan, session: Session) -> list[dict[str, dict[int, int]]]:
    """What every stage reported for every block, by iteration; of a loop's sides the opener speaks."""
    silent = {loop.answerer for loop in workflow.loops.values()}
    cluster = Cluster("test", "cpu", plan.num_devices, plan.num_devices, 0)
    executor = Executor(workflow, plan, session, cluster)
    found = []
    for iteration in range(ITERATIONS):
        reports = executor.run(Tick(iteration)).reports
        merged: dict[str, dict[int, int]] = {}
        for stage, rounds in ((s, r) for s, r in reports.items() if s not in silent and "." not in s):
            merged[f"{stage} rounds"] = {0: len(rounds) if workflow.loops else 1}
            merged[stage] = {b: v for answers in rounds for a in answers if isinstance(a, dict) for b, v in a.items()}
        found.append(merged)
    return found


def alone(workflow: Workflow) -> list[dict[str, dict[int, int]]]:
    """The same by one device, one stage after the other."""
    plain = [p for p in every_plan(workflow, 1) if "False" not in str(p.tree)]
    return outcome(workflow, plain[0], SerialSession())


@pytest.mark.parametrize("seed", SEEDS)
def test_every_feasible_plan_computes_what_one_device_computes(seed: int) -> None:
    workflow = random_workflow(seed)
    expected = alone(workflow)
    plans = every_plan(workflow, 3)
    assert plans
    for plan in plans:
        assert outcome(workflow, plan, SerialSession(20.0)) == expected, plan.tree


def test_the_cases_cover_what_there_is() -> None:
    workflows = [random_workflow(seed) for seed in SEEDS]
    assert sum(bool(work.loops) for work in workflows) >= 20
    assert sum(bool(work.barriers) for work in workflows) >= 5
    assert sum(bool(work.weight_edges) for work in workflows) >= 10
    assert sum(any(loop.judge for loop in work.loops.values()) for work in workflows) >= 8
    assert sum(any(len(work.sources(stage)) > 1 for stage in work.stages) for work in workflows) >= 12  # two join
    rounds = {len_ for work in workflows if work.loops for it in alone(work) for len_ in it["env rounds"].values()}
    assert rounds == {1, 2, 3}


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
