"""Every plan computes the same; only where and when differs."""

import os
from collections.abc import Sequence

import pytest
from counted_runs import PLANS, by_hand, make, totals, workflow
from placements import leaves

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import WorkerError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, SerialSession, Session
from rlinf_embodied.workflow.graph import Edge, StageSpec, Workflow


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_totals_computed_by_hand(name: str) -> None:
    assert totals(make(name, SerialSession(), workflow()), 3) == by_hand(3)


@pytest.mark.parametrize("name", ["collocated on 2", "disaggregated on 2", "hybrid on 2"])
def test_a_repeated_loop_runs_until_its_judge_has_enough(name: str) -> None:
    executor = make(name, SerialSession(), workflow(rounds=2))
    result = executor.run(StepContext(0))
    assert result.reports["actor"][0][0] == {"total": by_hand(1, rounds=2)[0], "message": "after 2"}
    assert len(result.reports["env"]) == 2


class Listening(SerialSession):
    """Knows which methods were called."""

    def __init__(self) -> None:
        super().__init__()
        self.methods: set[str] = set()

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        self.methods |= {call.method for _, call, _ in calls}
        return super().submit(calls, collective)


@pytest.mark.parametrize(
    ("plan", "methods"), [("collocated on 2", {"loop"}), ("one env, policy on all", {"open", "step", "close"})]
)
def test_a_loop_within_workers_is_one_call(plan: str, methods: set[str]) -> None:
    session = Listening()
    assert totals(make(plan, session, workflow()), 2) == by_hand(2)
    assert session.methods & {"loop", "open", "step", "close"} == methods


@pytest.mark.ray
@pytest.mark.parametrize("name", ["collocated on 2", "disaggregated on 2"])
def test_ray_gives_the_same_in_processes_of_their_own(name: str, ray_session: Session) -> None:
    executor = make(name, ray_session, workflow())
    assert totals(executor, 2) == by_hand(2)
    pids = {pid for pid, _ in executor.facts["env"]} | set(executor.facts["policy"])
    assert os.getpid() not in pids
    assert len(pids) == 2


@pytest.mark.ray
def test_a_failing_stage_names_itself_its_worker_and_the_reason(ray_session: Session) -> None:
    executor = make("collocated on 2", ray_session, workflow(env={"fail_at": 1}))
    with pytest.raises(WorkerError, match=r"worker \d .* failed in env.loop .*ValueError: the fake failed"):
        executor.run(StepContext(0))


def test_spans_cover_every_stage() -> None:
    result = make("disaggregated on 2", SerialSession(), workflow()).run(StepContext(0))
    assert {span.stage for span in result.spans} == {"env", "policy", "actor"}
    assert all(span.end_s >= span.start_s for span in result.spans)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("maker", "taker", "other", "stays"),
    [([0, 1], [0, 1], [0, 1], {0, 1, 2, 3}), ([1], [0, 1], [0, 1], {2, 3}), ([0], [0], [1], set())],
)
def test_what_is_consumed_only_where_it_was_made_is_the_object_itself(
    maker: list[int], taker: list[int], other: list[int], stays: set[int], ray_session: Session
) -> None:
    kinds = {"maker": "Maker", "taker": "Taker", "other": "Taker"}
    stages = {name: StageSpec(name, f"fakes.{kind}", None) for name, kind in kinds.items()}
    graph = Workflow("pair", 4, stages, (Edge("maker", "taker"), Edge("maker", "other")))
    plan = resolve("test", leaves(maker=maker, taker=taker, other=other), 2, graph)
    executor = Executor(graph, plan, ray_session, Cluster("test", "cpu", 2, 2, 0))
    result = executor.run(StepContext(5))
    for stage in ("taker", "other"):
        got = {block: value for report in result.all_of(stage, dict) for block, value in report.items()}
        assert got == {block: (block in stays, [block, 5]) for block in range(4)}
