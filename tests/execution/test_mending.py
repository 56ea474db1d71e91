"""An iteration that loses a worker gives what an undisturbed one gives, and only what is lost is done again."""

from __future__ import annotations

import random

import pytest
from any_plan import ITERATIONS, every_plan, features, random_workflow
from deferred_session import DeferredSession, Fault
from mendable_stages import with_state

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.mending import Mender, Repeated
from rlinf_embodied.execution.recovery import take
from rlinf_embodied.flow.graph import Workflow
from rlinf_embodied.flow.plan import Plan
from rlinf_embodied.runtime.host import StepContext

SEEDS = range(60)
OFTEN = 3  # of so many seeds one belongs to the tests that everybody runs
FAULTS_PER_PLAN = 2


def outcome(workflow: Workflow, plan: Plan, session: DeferredSession) -> tuple[list[dict], list[Repeated]]:
    """Returns what every stage reported, by iteration, and what was done again."""
    cluster = Cluster("test", "cpu", plan.num_devices, plan.num_devices, 0)
    executor = Executor(workflow, plan, session, cluster)
    repeated: list[Repeated] = []
    mender = executor.mender = Mender(session, executor, lambda error, mend: repeated.append(mend()))
    found = []
    for iteration in range(ITERATIONS):
        mender.snapshot = take(session, executor, iteration)
        result = executor.run(StepContext(iteration))
        silent = {loop.answerer for loop in workflow.loops.values()}
        found.append(
            {
                stage: told
                for stage, told in result.reports.items()
                if not {stage, *stage.split(".")[1:]} & {*silent, "install_weights"}
            }
        )
    return found, repeated


@pytest.mark.parametrize(
    "seed", [seed if seed % OFTEN == 0 else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS]
)
def test_whatever_is_lost_whenever_the_outcome_is_the_same(seed: int) -> None:
    draw = random.Random(seed)
    workflow = with_state(random_workflow(seed), seed)
    plans = every_plan(workflow, 3)
    rich = max(plans, key=lambda plan: (len(features(plan)), str(plan.tree)))
    for plan in [rich, *draw.sample(plans, min(2, len(plans)))]:
        undisturbed = DeferredSession()
        expected, none = outcome(workflow, plan, undisturbed)
        assert none == []
        for _ in range(FAULTS_PER_PLAN):
            at, kind, after = draw.randrange(undisturbed.number), draw.choice(["lost", "error"]), draw.random() < 0.5
            fault = Fault(lambda number, call, at=at: number > at and "snapshot" not in call.method, kind, after)
            session = DeferredSession([fault])
            found, repeated = outcome(workflow, plan, session)
            assert found == expected, (plan.tree, fault)
            assert len(repeated) == (fault.worker is not None)
