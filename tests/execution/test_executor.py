"""What a plan computes is what plain loops compute, in as few calls as its places allow."""

from collections.abc import Sequence

import pytest
from any_plan import mixed, outcome, rollouts
from placements import leaves
from plan_cases import parse

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, SerialSession, Session
from rlinf_embodied.workflow.graph import Edge, StageSpec, Workflow

ENV, POLICY, ACTOR = range(3)  # numbers of the stages


def by_hand(iterations: int) -> list[dict[int, int]]:
    """What the actor of `rollouts` makes of each block, written as plain loops."""
    weight, found = 0, []
    for i in range(iterations):
        made = {}
        for block in range(4):
            policy, env = 0, mixed(ENV, block, i, 0, 0, 0)
            for step in range(3):
                policy = mixed(POLICY, block, i, 0, weight, policy, step, env)
                env = mixed(ENV, block, i, 0, 0, env, step, policy)
            policy = mixed(POLICY, block, i, 0, weight, policy, env)  # which sees the last one, too
            made[block] = mixed(ACTOR, block, i, 0, weight, 0, policy, mixed(ENV, block, i, 0, 0, env, 0))
        found.append(made)
        weight = mixed(ACTOR, sum(made.values()))
    return found


class Listening(SerialSession):
    """Knows which methods were called."""

    def __init__(self) -> None:
        super().__init__()
        self.methods: set[str] = set()

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        self.methods |= {call.method for _, call, _ in calls}
        return super().submit(calls, collective)


@pytest.mark.parametrize(
    ("plan", "methods"),
    [
        ("env+policy on 0-1 > actor on 0-1", {"loop"}),
        ("env on 0 | policy on 0-1 > actor on 0-1", {"open", "step", "close"}),
    ],
)
def test_values_are_those_computed_by_hand_and_a_loop_within_workers_is_one_call(plan: str, methods: set[str]) -> None:
    session, work = Listening(), rollouts()
    found = outcome(work, parse(plan, 2, work), session, 3)
    assert [iteration["actor"] for iteration in found] == by_hand(3)
    assert session.methods & {"loop", "open", "step", "close"} == methods


@pytest.mark.ray
def test_what_is_consumed_only_where_it_was_made_is_the_object_itself(ray_session: Session) -> None:
    kinds = {"maker": "Maker", "taker": "Taker", "other": "Taker"}
    stages = {name: StageSpec(name, f"fakes.{kind}", None) for name, kind in kinds.items()}
    graph = Workflow("pair", 4, stages, (Edge("maker", "taker"), Edge("maker", "other")))
    for maker, taker, other, stays in (
        ([0, 1], [0, 1], [0, 1], {0, 1, 2, 3}),
        ([1], [0, 1], [0, 1], {2, 3}),
        ([0], [0], [1], set()),
    ):
        plan = resolve("test", leaves(maker=maker, taker=taker, other=other), 2, graph)
        executor = Executor(graph, plan, ray_session, Cluster("test", "cpu", 2, 2, 0))
        result = executor.run(StepContext(5))
        for stage in ("taker", "other"):
            got = {block: value for report in result.all_of(stage, dict) for block, value in report.items()}
            assert got == {block: (block in stays, [block, 5]) for block in range(4)}
