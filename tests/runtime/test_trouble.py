"""Trouble on Ray is seen at once, with the worker whose fault it is; a worker that was lost is replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from troubled import NEVER_S, build, run

from experiments.bench.harness.trainings import resting
from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.errors import HangError, LostWorkerError, RlinfError, WorkerError
from rlinf_embodied.runtime.health import is_stopped
from rlinf_embodied.runtime.host import WorkerSpec
from rlinf_embodied.runtime.ray_session import RaySession

pytestmark = pytest.mark.ray

SEEN_S = 5  # within which a dead worker is named ...
MARGIN = 4  # ... on a machine that has other things to do
HANG_S = 2.0


@pytest.fixture
def session(ray_cluster) -> Iterator[RaySession]:
    """Two workers without torch, which start soon; one without progress for two seconds more than ever hangs."""
    yield from opened(EMULATED)


def opened(device: str) -> Iterator[RaySession]:
    made = RaySession(hang_after_s=HANG_S)
    made.start([WorkerSpec(k, device) for k in range(2)])
    yield made
    made.close()


@pytest.fixture
def session_with_torch(ray_cluster) -> Iterator[RaySession]:
    """As `session`, with gloo."""
    yield from opened("cpu")


def trouble(session: RaySession) -> tuple[RlinfError, float]:
    """Returns what the driver learns of the second iteration, and after how many seconds."""
    run(session, 0)
    start = time.monotonic()
    with pytest.raises(RlinfError) as caught:
        run(session, 1)
    return caught.value, time.monotonic() - start


def test_workers_of_a_benchmark_rest_while_others_are_timed(session) -> None:
    pids = build(session, "Maker", {})
    assert session.processes() == dict(enumerate(pids))
    with resting([session]):
        while not all(is_stopped(pid) for pid in pids):
            time.sleep(0.01)
    while any(is_stopped(pid) for pid in pids):
        time.sleep(0.01)
    assert len(run(session, 0)) == 2


def test_a_member_that_fails_keeps_nobody_waiting_and_is_the_one_that_is_named(session_with_torch) -> None:
    session = session_with_torch
    build(session, "Gang", {1: "raise"}, "cpu")
    error, seconds = trouble(session)
    assert isinstance(error, WorkerError)
    assert error.workers == (1,)
    assert "ValueError: a fault" in str(error)
    start = time.monotonic()
    session.replace(error.workers)  # the other one waits no longer, and stays
    assert seconds + time.monotonic() - start < SEEN_S * MARGIN
    assert len(build(session, "Gang", {}, "cpu")) == 2


@pytest.mark.parametrize(("kind", "fate"), [("Gang", "stop"), ("Maker", "livelock")])
def test_a_hang_is_reported_with_its_culprit(session, kind, fate) -> None:
    pids = build(session, kind, {1: fate})
    error, seconds = trouble(session)
    assert isinstance(error, HangError)
    assert error.workers == (1,)
    assert f"worker 1 (pid {pids[1]}, " in str(error)
    assert seconds < 30
    if fate == "stop":
        assert "is stopped (SIGSTOP)" in str(error)
    else:
        assert "makes no progress in stage.run" in str(error)
        assert "spin_until" in str(error)  # its stack
    if kind == "Gang":
        assert "worker 0 " in str(error)
        assert "waits in exchange of stage.run" in str(error)


def test_a_dead_worker_is_named_with_what_it_did_and_replaced_and_the_others_stay(session) -> None:
    before = build(session, "Gang", {1: "die"})
    error, seconds = trouble(session)
    assert isinstance(error, LostWorkerError)
    assert error.workers == (1,)
    assert f"worker 1 (pid {before[1]}, " in str(error)
    assert "stage.run (iteration 1, blocks 1-1)" in str(error)
    assert seconds < SEEN_S * MARGIN
    start = time.monotonic()
    session.replace(error.workers)
    session.clear()
    after = build(session, "Gang", {})
    assert time.monotonic() - start < NEVER_S / 3
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert session.attempt == 1
    assert [len(run(session, iteration)) for iteration in range(3)] == [2, 2, 2]


def test_a_member_that_dies_before_it_came_keeps_nobody_waiting(session_with_torch) -> None:
    session = session_with_torch
    pid = session.processes()[1]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(HANG_S, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(LostWorkerError) as caught:
        build(session, "Gang", {}, "cpu")
    assert caught.value.workers == (1,)
    session.replace(caught.value.workers)
    session.clear()
    assert len(build(session, "Gang", {}, "cpu")) == 2


def test_a_worker_that_dies_between_calls_is_missed_at_the_next_one(session) -> None:
    pids = build(session, "Maker", {})
    run(session, 0)
    os.kill(int(str(pids[0])), signal.SIGKILL)
    with pytest.raises(LostWorkerError) as caught:
        run(session, 1)
    assert caught.value.workers == (0,)
