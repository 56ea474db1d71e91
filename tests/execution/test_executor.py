"""Every plan computes the same; only where and when differs."""

import os
from collections.abc import Sequence

import pytest
from counted_runs import PLANS, by_hand, make, totals, workflow

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, SerialSession, Session


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
    ("transport", "methods"), [("adaptive", {"loop"}), ("object_store", {"open", "step", "close"})]
)
def test_a_loop_within_workers_is_one_call_unless_everything_goes_through_the_store(
    transport: str, methods: set[str]
) -> None:
    session = Listening()
    executor = make("collocated on 2", session, workflow(), transport)
    assert totals(executor, 2) == by_hand(2)
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
