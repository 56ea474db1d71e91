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
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.workflow.graph import Workflow

SEEDS = range(60)
OFTEN = 3  # of so many seeds one belongs to the tests that everybody runs
FAULTS_PER_PLAN = 2


def outcome(workflow: Workflow, plan: Plan, session: DeferredSession) -> tuple[list[dict], list[Repeated]]:
    """Returns what every stage reported, by iteration, and what was done again."""
    cluster = Cluster("test", "cpu", plan.num_devices, plan.num_devices, 0)
    executor = Executor(workflow, plan, session, cluster)
    repeated: list[Repeated] = []
    mender = executor.submitter.mender = Mender(session, executor, lambda error, mend: repeated.append(mend()))
    found = []
    for iteration in range(ITERATIONS):
        mender.snapshot = take(session, executor, iteration)
        result = executor.run(StepContext(iteration))
        silent = {side for loop in workflow.loops.values() for side in loop.sides[1:]}
        found.append(
            {
                stage: told
                for stage, told in result.reports.items()
                if not {stage, *stage.split(".")[1:]} & {*silent, "install_weights"}
            }
        )
    return found, repeated


def random_fault(draw: random.Random, num_calls: int) -> Fault:
    """Returns a fault of an iteration, which may come while another one is mended."""
    at, kind, after = draw.randrange(num_calls), draw.choice(["lost", "error"]), draw.random() < 0.5
    return Fault(lambda number, call: number > at and call.method != "export_snapshot", kind, after)


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
            faults = [random_fault(draw, undisturbed.number) for _ in range(draw.choice([1, 1, 4]))]
            found, repeated = outcome(workflow, plan, DeferredSession(faults))
            assert found == expected, (plan.tree, faults)
            assert bool(repeated) == any(fault.worker is not None for fault in faults)


def test_whoever_was_replaced_for_a_fault_that_another_one_overtook_gets_its_stages() -> None:
    workflow = with_state(random_workflow(0), 0)
    plan = next(plan for plan in every_plan(workflow, 3) if len(plan.devices()) == 3)
    expected, _ = outcome(workflow, plan, DeferredSession())

    def works(number: int, call: Call) -> bool:
        return call.step_context.iteration == 1 and call.method in ("run", "loop", "step")

    overtaking = Fault(lambda number, call: call.method == "import_snapshot", "error")
    session = DeferredSession([Fault(works, others=(0, 1, 2)), overtaking])
    found, (repeated,) = outcome(workflow, plan, session)
    assert overtaking.worker is not None
    assert found == expected
    assert repeated.workers == (0, 1, 2)
