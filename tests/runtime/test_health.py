"""Health checks reach a worker during its calls, progress keeps long calls alive, and no stranger ends anything."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.exceptions import RaySystemError
from troubled import build, run

from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.errors import HangError, StaleCallError, WorkerError
from rlinf_embodied.runtime.diagnosis import History, Watched
from rlinf_embodied.runtime.health import Health, translated
from rlinf_embodied.runtime.host import StageContext, WorkerSpec
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.runtime.stage_group import Mailbox, MailGroup, StageGroup
from rlinf_embodied.runtime.worker_state import Membership, Status, WorkerState
from rlinf_embodied.telemetry.progress import report_progress
from rlinf_embodied.workflow.graph import StageSpec

GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", b"5\n{]\n", b"\x00" * 64, os.urandom(4096))


# ------------------------------------------------------------------------------------------------------- worker's side
def test_progress_within_a_call_is_what_counts() -> None:
    state = WorkerState()
    with state.calling("actor.run (iteration 1)"), state.stepping("actor.run"):
        time.sleep(0.05)
        report_progress()
        status = state.status()
        assert status.longest_s is not None
        assert status.longest_s >= 0.05 > status.step_s
    report_progress()  # nobody watches
    assert state.status().call == ""


def test_the_stack_is_that_of_the_call() -> None:
    state, begun, ends = WorkerState(), threading.Event(), threading.Event()

    def wait_for_the_end() -> None:
        with state.calling("a call"):
            begun.set()
            ends.wait()

    thread = threading.Thread(target=wait_for_the_end)
    thread.start()
    begun.wait()
    assert "wait_for_the_end" in state.status(stack=True).stack
    ends.set()
    thread.join()


def test_a_call_of_an_attempt_that_was_given_up_is_refused_however_late_it_comes() -> None:
    state = WorkerState()
    state.begin(1)
    state.abandon(3)
    with pytest.raises(StaleCallError):
        state.begin(2)
    state.begin(3)
    state.abandon(2)  # arrives late, and changes nothing
    assert state.attempt == 3


def test_members_without_torch_exchange_by_messages_and_a_wait_ends_when_it_is_given_up() -> None:
    mails = [Mailbox(), Mailbox()]
    deliver = {rank: mail.deliver for rank, mail in enumerate(mails)}
    groups = [StageGroup(MailGroup("g", k, deliver, mails[k]), "s", WorkerState()) for k in range(2)]  # pyright: ignore[reportArgumentType]
    found: dict[int, object] = {}
    other = threading.Thread(target=lambda: found.update({1: groups[1].exchange([2.0], [1, 1])}))  # pyright: ignore[reportArgumentType]
    other.start()
    found[0] = groups[0].exchange([1.0], [1, 1])  # pyright: ignore[reportArgumentType]
    other.join()
    assert found[0] == found[1] == [[1.0], [2.0]]
    closing = threading.Timer(0.05, groups[0].close)
    closing.start()
    with pytest.raises(StaleCallError):
        groups[0].exchange([1.0], [1, 1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(StaleCallError):
        groups[0].exchange([1.0], [1, 1])  # pyright: ignore[reportArgumentType]


def test_a_module_that_only_a_worker_cannot_import_is_named_with_its_line(tmp_path: Path) -> None:
    """Ray wraps the failure to unpickle a call's arguments, which is no input that was lost with another worker."""
    plug_in = tmp_path / "plug_in.py"
    plug_in.write_text("\n\nimport no_such_library\n")
    try:
        exec(compile(plug_in.read_text(), str(plug_in), "exec"))
    except ImportError as error:
        wrapped = RaySystemError(error, traceback.format_exc())
    raised = translated(wrapped, 2, "env.setup", {})
    assert type(raised) is WorkerError
    assert raised.workers == (2,)
    first, *lines = str(raised).splitlines()
    assert first == "worker 2, in env.setup: what was sent to it cannot be unpickled there:"
    assert f'  File "{plug_in}", line 3, in <module>' in lines
    assert lines[-1] == "ModuleNotFoundError: No module named 'no_such_library'"


def test_a_context_belongs_to_its_host() -> None:
    """What the driver made of it is not changed: it may build the stage again from it."""
    context = StageContext(0, "cpu", (0,), ((0,),), 1, (0,))
    session = SerialSession()
    session.start([WorkerSpec(0, "cpu")])
    session.add_stage(StageSpec("stage", "troubled.Maker", {}), [context])
    assert context == StageContext(0, "cpu", (0,), ((0,),), 1, (0,), context.group, {})


@pytest.mark.parametrize("misses", [3, 1000])  # checks that worker 0 does not answer in time: some, or all
def test_a_hang_is_reported_when_the_others_have_answered_or_after_a_limit(monkeypatch, misses: int) -> None:
    """Worker 1 is stopped, which the kernel reports; only worker 0's answer shows that it waits for worker 1."""
    waits = Status("stage.run", "stage.run", 0.0, 0.1, {"stage": Membership(0, entered=1, waits_in="exchange")})
    answers = repeat({}, misses)
    now = count(100.0)  # a second between two checks
    monkeypatch.setattr("rlinf_embodied.runtime.health.is_stopped", lambda pid: pid == 101)
    monkeypatch.setattr("rlinf_embodied.runtime.health.time", SimpleNamespace(monotonic=lambda: next(now)))
    watches = Health({}, "here", History(hang_after_s=0.0))
    monkeypatch.setattr(watches, "_statuses", lambda stacks: next(answers, {0: waits}))
    watches.workers.update({k: Watched(k, 100 + k, "here") for k in range(2)})
    for k in range(2):
        watches.note(f"receipt {k}", k, "stage.run")  # pyright: ignore[reportArgumentType]
    with pytest.raises(HangError) as caught:  # noqa: PT012
        for _ in range(100):
            watches._require_progress("stage.run")
    assert caught.value.workers == (1,)
    assert "worker 1 (pid 101, here) is stopped (SIGSTOP)" in str(caught.value)
    assert ("worker 0 (pid 100, here) waits in exchange of stage.run" in str(caught.value)) == (misses == 3)


# ------------------------------------------------------------------------------------------------------------------ ray
@pytest.fixture
def session(ray_cluster) -> Iterator[RaySession]:
    made = RaySession(hang_after_s=1.0, first_progress_s=60.0)
    made.start([WorkerSpec(k, EMULATED) for k in range(2)])
    yield made
    made.close()


@pytest.mark.ray
def test_a_long_call_that_reports_progress_is_no_hang(session) -> None:
    build(session, "Maker", {0: "work", 1: "work"})
    run(session, 0)
    assert len(run(session, 1)) == 2  # three times as long as a worker may be without progress


@pytest.mark.ray
def test_what_a_stranger_sends_to_any_port_ends_nothing(ray_session) -> None:
    session = ray_session
    session.start([WorkerSpec(k, "cpu") for k in range(2)])
    build(session, "Gang", {}, "cpu")  # torch's groups listen
    run(session, 0)
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in session.processes().values())]
    ports = {c.laddr[:2] for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    torchs = 0
    for host, port in ports:
        for content in GARBAGE:
            try:
                with socket.create_connection(
                    (host if host not in ("::", "0.0.0.0") else "127.0.0.1", port), 5
                ) as line:
                    line.sendall(content)
                    torchs += 1
            except OSError:
                pass
    assert torchs > 0
    for iteration in range(5):
        assert len(run(session, iteration + 2)) == 2


@pytest.mark.ray
def test_answers_that_nobody_fetches_are_forgotten(ray_cluster) -> None:
    health = Health({}, "here", History())
    results = [ray.put(k) for k in range(2000)]
    for k in range(0, 2000, 2):
        health.note(results[k], 0, "call", (), [results[k + 1]])
    assert len(health._waiting) <= 512
    assert len(health._makers) <= 512
