"""The serial session: all workers in one process, collective calls in threads, switches, workers without torch."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from any_plan import Fake, fake

from rlinf_embodied.cluster.hardware import Cluster, with_cores
from rlinf_embodied.errors import HangError, ObjectiveError, PlanError, WorkerError
from rlinf_embodied.execution.executor import worker_spec
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.host import (
    Call,
    LocalRef,
    Output,
    Receipt,
    StageContext,
    StepContext,
    WorkerHost,
    WorkerSpec,
    solo_context,
)
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.workflow.graph import StageSpec


class Member:
    """Sums its worker's number over all workers; raises, or waits for an event, where its config says so."""

    def __init__(self, config: dict[int, object] | None) -> None:
        self.config = config or {}

    def setup(self, context: StageContext) -> int:
        self.worker, self.group = context.worker, context.group
        return context.worker

    def total(self, step_context: StepContext) -> float:
        fate = self.config.get(self.worker)
        if isinstance(fate, Exception):
            raise fate
        if isinstance(fate, threading.Event):
            fate.wait(60)
        return float(self.group.all_reduce(torch.tensor([float(self.worker)]))[0])

    def run(self, step_context: StepContext, inputs: dict[int, list[object]]) -> Output:
        return Output({block: (self.worker, payloads) for block, payloads in inputs.items()}, "done")


def context(worker: int, size: int) -> StageContext:
    return StageContext(worker, "cpu", (worker,), ((worker,),), size, tuple(range(size)), SoloGroup(), {})


def session_with(fates: dict[int, object] | None, size: int = 3, timeout_s: float = 60.0) -> SerialSession:
    session = SerialSession(timeout_s)
    session.start([WorkerSpec(k, "cpu") for k in range(size)])
    spec = StageSpec("member", "runtime_session.Member", fates, collective=True)
    assert session.add_stage(spec, [context(k, size) for k in range(size)]) == list(range(size))
    return session


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Stages are named by dotted paths; this module is one for the session."""
    import sys

    monkeypatch.setitem(sys.modules, "runtime_session", sys.modules[__name__])


def totals(session: SerialSession, size: int = 3) -> list[object]:
    calls = [(k, Call("member", "total", StepContext(0)), []) for k in range(size)]
    receipts = session.fetch([refs[-1] for refs in session.submit(calls, collective=True)], "totals")
    return [receipt.report for receipt in receipts if isinstance(receipt, Receipt)]


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


class Littering:
    """Leaves garbage that only a collector finds."""

    def __init__(self, config: list[weakref.ref]) -> None:
        config.append(weakref.ref(Cycle()))

    def setup(self, context: StageContext) -> None: ...

    def run(self, step_context: StepContext) -> None: ...


def test_what_set_up_made_is_hidden_from_the_collector_but_its_garbage() -> None:
    gc.unfreeze()
    gc.disable()
    try:
        host, garbage = WorkerHost(WorkerSpec(0, "cpu"), alone=True), []
        host.add_stage(StageSpec("stage", "runtime_session.Littering", garbage), context(0, 1))
        assert garbage[0]() is not None
        host.invoke(Call("stage", "run", StepContext(0)), [])
        assert garbage[0]() is None
        assert gc.get_freeze_count() > 0
        host.clear()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
        gc.freeze()


@pytest.mark.parametrize(("alone", "threads"), [(True, 3), (False, 1)])
def test_a_process_computes_with_its_spec_s_threads_unless_it_holds_several_workers(alone: bool, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        host = WorkerHost(WorkerSpec(0, "cpu", threads=3), alone=alone)
        host.add_stage(StageSpec("member", "runtime_session.Member", None), context(0, 1))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_worker_on_an_accelerator_has_its_share_of_the_node_s_cores() -> None:
    gpus = Cluster("test", "cuda", 4, 30, 80 << 30)
    assert [worker_spec(gpus, k).threads for k in range(4)] == [7] * 4
    assert [worker_spec(with_cores(gpus, 2), k).threads for k in range(6)] == [7] * 4 + [1] * 2
    assert worker_spec(Cluster("test", "cpu", 2, 16, 0), 0).threads == 1


def test_members_of_a_gang_meet() -> None:
    assert totals(session_with(None)) == [3.0, 3.0, 3.0]
    assert totals(session_with(None, size=1), size=1) == [0.0]


@pytest.mark.parametrize(
    ("fate", "error", "message"),
    [
        (ObjectiveError("the ratio is not 1"), ObjectiveError, "the ratio is not 1"),
        (ValueError("a bug"), WorkerError, r"worker 1 .* failed in member.total .*ValueError: a bug"),
    ],
)
def test_a_member_that_fails_does_not_keep_the_others_waiting(fate, error, message: str) -> None:
    before = threading.active_count()
    start = time.monotonic()
    with pytest.raises(error, match=message):
        totals(session_with({1: fate}))
    assert time.monotonic() - start < 20  # the limit is 60 s
    assert threading.active_count() == before


def test_a_member_that_hangs_is_a_hang_of_the_gang() -> None:
    awake = threading.Event()
    with pytest.raises(HangError, match=r"waited 0.2 s for the others in all_reduce"):
        totals(session_with({1: awake}, timeout_s=0.2))
    awake.set()


def test_an_aborted_group_is_spent_for_every_member() -> None:
    groups = ThreadGroup.make(2, timeout_s=60)
    groups[0].close()
    for group in groups:
        with pytest.raises(HangError, match="one of them failed"):
            group.all_reduce(torch.zeros(1))


def test_what_is_kept_stays_in_the_worker_for_this_iteration_only() -> None:
    session = session_with(None)
    keep = Call("member", "run", StepContext(0), (1,), 1, keep=frozenset({1}))
    (((kept, receipt),)) = session.submit([(1, keep, ["x"])])
    assert isinstance(kept, LocalRef)
    assert isinstance(receipt, Receipt)
    assert receipt.report == "done"
    again = Call("member", "run", StepContext(0), (1,), 1)
    ((value, _),) = session.submit([(1, again, [kept])])
    assert value == (1, [(1, ["x"])])
    with pytest.raises(WorkerError, match="KeyError"):
        session.submit([(1, Call("member", "run", StepContext(1), (1,), 1), [kept])])


def test_a_worker_is_started_once_however_often_it_is_named() -> None:
    session = session_with(None)
    session.start([WorkerSpec(0, "cpu"), WorkerSpec(3, "cpu")])
    assert totals(session) == [3.0, 3.0, 3.0]  # its stages are still there
    session.close()
    with pytest.raises(KeyError):
        totals(session)


def host(**exclusive: set[str]) -> WorkerHost:
    worker = WorkerHost(WorkerSpec(0, "cpu"))
    for number, (name, others) in enumerate(exclusive.items()):
        context = solo_context(range(2))
        context.exclusive = frozenset(others)
        worker.add_stage(fake(name, number), context)
    return worker


def offloaded(worker: WorkerHost) -> set[str]:
    return {name for name, stage in worker.stages.items() if isinstance(stage, Fake) and stage.offloaded}


def spans(worker: WorkerHost, stage: str, method: str) -> list[str]:
    (*_, receipt) = worker.invoke(Call(stage, method, StepContext(0), blocks=(0, 1) if method == "run" else ()), [])
    assert isinstance(receipt, Receipt)
    return [span.name for span in receipt.spans]


def test_a_call_makes_room_and_comes_back() -> None:
    worker = host(a={"c"}, b={"c"}, c={"a", "b"})
    assert offloaded(worker) == {"a", "b"}  # made for the last one that was built
    assert spans(worker, "b", "run") == ["c.offload", "b.onload", "b.run"]
    assert offloaded(worker) == {"a", "c"}
    assert spans(worker, "a", "run") == ["a.onload", "a.run"]
    assert spans(worker, "a", "run") == ["a.run"]
    assert spans(worker, "c", "enter") == ["a.offload", "b.offload", "c.onload"]
    assert spans(worker, "c", "run") == ["c.run"]


def test_later_parts_of_weights_are_exported_without_another_switch(monkeypatch) -> None:
    monkeypatch.setattr(Fake, "export_weights", lambda self, step_context: self.weights[0])
    worker, switches = host(a={"b"}, b={"a"}), []
    for part in range(3):
        at = StepContext(0, chunk=part, num_chunks=3)
        weights, sent = worker.invoke(Call("a", "export_weights", at, publishes=True), [])
        (installed,) = worker.invoke(Call("b", "install_weights", at), [weights])
        switches += [span.name for receipt in (sent, installed) for span in receipt.spans if "load" in span.name]
    assert switches == ["b.offload", "a.onload", "a.offload", "b.onload"]


def test_a_stage_that_was_replaced_is_not_offloaded() -> None:
    worker = host(a={"b"}, b={"a"})
    worker.add_stage(fake("a", 0), solo_context(range(2)))
    assert spans(worker, "a", "run") == ["a.run"]


def test_a_plan_that_switches_what_cannot_be_switched_is_refused() -> None:
    context = solo_context(range(1))
    context.exclusive = frozenset({"actor"})
    with pytest.raises(PlanError, match=r"offloads env from the memory of cpu for actor, but a Maker stays there"):
        WorkerHost(WorkerSpec(0, "cpu")).add_stage(StageSpec("env", "fakes.Maker", None), context)


HEAVY = {"torch", "sapien", "mani_skill", "gymnasium", "transformers", "matplotlib"}
MOST_MB = 160  # measured: see docs; 64 of them and Ray fit into 16 GiB


@pytest.mark.ray
def test_a_worker_without_torch_stays_small(new_ray_session):
    new_ray_session.start([WorkerSpec(0, "emulated")])
    context = StageContext(0, "emulated", (0,), ((0,),), 1, (0,), SoloGroup(), {})
    new_ray_session.add_stage(StageSpec("looker", "light_fakes.Looker", None), [context])
    ((result, receipt),) = new_ray_session.submit([(0, Call("looker", "run", StepContext(0), (0,)), [])])
    found, answer = new_ray_session.fetch([result, receipt], "looker")
    assert found == {"seen": []}
    assert isinstance(answer, Receipt)
    modules, kilobytes = answer.report
    assert "numpy" in modules
    assert {name.split(".")[0] for name in modules} & HEAVY == set()
    assert kilobytes / 1024 < MOST_MB
