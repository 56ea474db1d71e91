"""Iterations that overlap: which weights make which data is a matter of the staleness alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from any_plan import Fake, any_plans, by_block, outcome, random_workflow

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution import snapshots
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.iteration import Iteration, IterationResult
from rlinf_embodied.planning.check import never_ahead
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import collocated
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.workflow.graph import Workflow

NUMBER = 5  # iterations
CASES = [seed for seed in range(200) if not never_ahead(random_workflow(seed))]


def parts_of(workflow: Workflow) -> tuple[list[str], list[str]]:
    """Returns the front and the back of an iteration."""
    order, back = workflow.order(), workflow.back()
    return [name for name in order if name not in back], [name for name in order if name in back]


class HandMade:
    """One device, whose weights are put in by hand before each half of an iteration."""

    def __init__(self, workflow: Workflow, staleness: int) -> None:
        plan = collocated(workflow, 1)
        self.session, self.staleness = SerialSession(), staleness
        self.executor = Executor(workflow, plan, self.session, Cluster("test", "cpu", 1, 1, 0))
        self.versions, (self.front, self.back) = [0], parts_of(workflow)

    def weights(self) -> list[int]:
        (edge,) = self.executor.workflow.weight_edges
        stage = self.session._hosts[0].stages[edge.source]
        assert isinstance(stage, Fake)
        return stage.weights

    def iteration(self, number: int) -> IterationResult:
        state = Iteration(StepContext(number))
        self.weights()[0] = self.versions[max(0, number - self.staleness)]
        self.executor.run_stages(self.front, state)
        self.weights()[0] = self.versions[number]
        self.executor.run_stages(self.back, state)
        self.executor.collect_receipts(state)
        self.versions.append(self.weights()[0])
        return state.result


def test_there_are_cases_of_every_kind() -> None:
    workflows = [random_workflow(seed) for seed in CASES]
    assert len(CASES) >= 20
    assert sum(bool(workflow.loops) for workflow in workflows) >= 5
    assert sum(workflow.repeat is not None for workflow in workflows) >= 1


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("seed", CASES[:12])
def test_no_plan_changes_which_weights_make_which_data(seed: int, staleness: int) -> None:
    workflow = random_workflow(seed)
    by_hand = HandMade(workflow, staleness)
    expected = [by_block(workflow, by_hand.iteration(number)) for number in range(NUMBER)]
    for plan in any_plans(workflow, 2, seed, 15):
        ahead = replace(plan, staleness=staleness)
        assert outcome(workflow, ahead, SerialSession(20.0), NUMBER) == expected, to_text(plan)


def test_staleness_changes_what_is_computed() -> None:
    changed = 0
    for workflow in map(random_workflow, CASES):
        plan = collocated(workflow, 1)
        found = [outcome(workflow, replace(plan, staleness=k), SerialSession(), NUMBER) for k in range(3)]
        changed += found[0] != found[1] != found[2]
    assert changed >= len(CASES) // 2


@pytest.mark.ray
def test_a_run_on_ray_continues_with_fronts_two_iterations_ahead_and_snapshots(ray_session) -> None:
    """At first all fronts have the same weights, so that a snapshot holds one reference several times."""
    workflow = random_workflow(CASES[0])
    plan = replace(collocated(workflow, 2), staleness=2)
    expected = outcome(workflow, plan, SerialSession(), NUMBER)
    executor = Executor(workflow, plan, ray_session, Cluster("test", "cpu", 2, 2, 0))
    found = []
    for number in range(NUMBER):
        found.append(by_block(workflow, executor.run(StepContext(number))))
        snapshots.take(ray_session, executor, number + 1)
    assert found == expected
