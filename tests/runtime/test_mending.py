"""On Ray a lost worker is replaced while the others keep their stages, and collectives go on with another group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.errors import HangError, LostWorkerError, RlinfError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.heartbeat import Activity
from rlinf_embodied.runtime.host import Call, StageContext, StepContext, WorkerSpec
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import MendingSession, Ref, SerialSession
from rlinf_embodied.runtime.watched_group import WatchedGroup
from rlinf_embodied.workflow.graph import StageSpec


@pytest.fixture
def session(ray_cluster) -> Iterator[RaySession]:
    """Two workers without torch, which start soon."""
    made = RaySession(timeout_s=300, hang_after_s=2.0)
    made.start([WorkerSpec(k, EMULATED) for k in range(2)])
    yield made
    made.close()


def contexts() -> list[StageContext]:
    return [StageContext(k, EMULATED, (k,), ((k,),), 2, (0, 1), SoloGroup(), {}) for k in range(2)]


def submit(session: RaySession, stage: str, iteration: int) -> list[Ref]:
    """Returns the receipts of a call on both workers."""
    calls = [(k, Call(stage, "run", StepContext(iteration), (k,)), []) for k in range(2)]
    return [refs[-1] for refs in session.submit(calls)]


@pytest.mark.ray
@pytest.mark.parametrize("fate", ["die", pytest.param("stop", marks=pytest.mark.slow)])
def test_the_others_keep_their_stages_and_meet_in_another_group(session, fate) -> None:
    specs = {
        "gang": StageSpec("gang", "troubled.Gang", {1: fate}, collective=True),
        "maker": StageSpec("maker", "troubled.Maker", {}),
    }
    before = {name: session.add_stage(spec, contexts()) for name, spec in specs.items()}
    assert all(session.can_renew(spec, [0, 1]) for spec in specs.values())
    lost, made = submit(session, "gang", 1), submit(session, "maker", 1)
    with pytest.raises(RlinfError) as caught:
        session.fetch([*lost, *made], "both")
    assert isinstance(caught.value, LostWorkerError | HangError)
    assert session.mend(caught.value.workers) == {1}
    assert session.attempt == 1
    assert session.failed(lost) == [True, True]  # worker 0 waited for worker 1
    assert session.failed(made)[0] is False
    for spec in specs.values():
        session.renew_stage(spec, contexts(), {1})
    for name in specs:
        assert len(session.fetch(submit(session, name, 2), name)) == 2
    session.renew_stage(specs["maker"], contexts(), ())
    pids = session.add_stage(StageSpec("who", "troubled.Maker", {}), contexts())
    assert pids[0] == before["gang"][0] == before["maker"][0]
    assert pids[1] != before["gang"][1]


def test_only_sessions_whose_errors_come_with_a_fetch_mend() -> None:
    assert isinstance(RaySession.__new__(RaySession), MendingSession)
    assert not isinstance(SerialSession(), MendingSession)


def test_a_group_goes_on_as_another_unless_something_holds_what_is_inside_of_it() -> None:
    inner = ThreadGroup.make(2)
    group = WatchedGroup(inner[0], "stage", Activity())
    group.close()
    with pytest.raises(RlinfError, match="was closed"):
        group.all_reduce(None)  # pyright: ignore[reportArgumentType]
    group.renew(ThreadGroup.make(2)[0])
    assert group.is_held is False
    assert group.make is not None  # as what shards weights takes the store
    assert group.is_held is True
