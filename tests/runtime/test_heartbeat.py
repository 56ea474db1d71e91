"""Workers tell what they do beside their calls; those that cannot are told apart from those that are gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest
import torch

from rlinf_embodied.errors import HangError, StaleCallError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.heartbeat import Activity, Beat, Line, Pulse
from rlinf_embodied.runtime.switchboard import Switchboard, is_stopped
from rlinf_embodied.runtime.watched_group import WatchedGroup

WORKER = """
import sys, time
from rlinf_embodied.runtime.heartbeat import Activity, Line, Pulse
activity = Activity()
Pulse(Line("127.0.0.1", int(sys.argv[1]), sys.argv[2], 5), activity, "here", lambda attempt: None)
with activity.calling("env.step (iteration 2)"), activity.stepping("env.step"):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def board():
    made = Switchboard("here")
    yield made
    made.close()


@pytest.fixture
def process(board):
    line = board.line(5)
    command = [sys.executable, "-c", WORKER, str(line.port), line.token]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    yield made
    made.kill()
    made.wait()


def test_a_busy_worker_tells_its_call_and_its_stack(board, process) -> None:
    caller = board.ask(10, stacks=[5])[5]
    assert (caller.pid, caller.node, caller.silent_since) == (process.pid, "here", None)
    assert caller.beat.call == "env.step (iteration 2)"
    assert caller.beat.step == "env.step"
    assert 0 < caller.beat.step_s <= caller.beat.call_s < 60
    assert "time.sleep(60)" in caller.beat.stack or "<module>" in caller.beat.stack
    assert board.ask(10)[5].beat.stack == ""


def test_a_stopped_worker_is_silent_and_a_killed_one_is_gone(board, process) -> None:
    assert board.ask(10)[5].silent_since is None
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not is_stopped(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    caller = board.ask(0.5)[5]
    since = caller.silent_since
    assert since is not None
    assert board.ask(0.1)[5].silent_since == since
    assert not board.gone()
    process.kill()
    process.wait()
    board.ask(1)
    assert [caller.worker for caller in board.gone()] == [5]
    assert not is_stopped(process.pid)


def test_a_stranger_without_the_token_is_nobody(board) -> None:
    line = board.line(1)
    Pulse(Line(line.host, line.port, "guessed", 1), Activity(), "here", lambda attempt: None)
    time.sleep(0.1)
    assert board.ask(0.2) == {}


def test_workers_hear_that_an_attempt_is_given_up(board) -> None:
    heard = threading.Event()
    attempts: list[int] = []

    def abandon(attempt: int) -> None:
        attempts.append(attempt)
        heard.set()

    Pulse(board.line(1), Activity(), "here", abandon)
    board.ask(5)
    board.abandon(3)
    assert heard.wait(10)
    assert attempts == [3]


def test_progress_restarts_the_clock_and_the_longest_wait_is_kept() -> None:
    activity = Activity()
    with activity.calling("actor.run"), activity.stepping("actor.run"):
        time.sleep(0.05)
        activity.progress()
        beat = activity.beat()
        assert beat.step_s < 0.05 <= beat.call_s
        assert beat.longest_s is not None
        assert beat.longest_s >= 0.05
    assert activity.beat().call == ""


def test_a_member_that_waits_says_how_far_it_is() -> None:
    activity = Activity()
    groups = ThreadGroup.make(2, timeout_s=30)
    waiting = WatchedGroup(groups[0], "actor", activity)
    thread = threading.Thread(target=lambda: waiting.all_reduce(torch.ones(1)))
    thread.start()
    deadline = time.monotonic() + 10
    while not activity.beat().meetings["actor"].waits and time.monotonic() < deadline:
        time.sleep(0.01)
    meeting = activity.beat().meetings["actor"]
    assert (meeting.rank, meeting.size, meeting.entered, meeting.waits) == (0, 2, 1, "all_reduce")
    WatchedGroup(groups[1], "actor", Activity()).all_reduce(torch.ones(1))
    thread.join()
    assert activity.beat().meetings["actor"].waits == ""


def test_a_member_that_leaves_ends_the_wait_of_the_others_and_comes_to_nothing_more() -> None:
    groups = [WatchedGroup(group, "actor", Activity()) for group in ThreadGroup.make(2, timeout_s=30)]
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            groups[0].all_reduce(torch.ones(1))
        except HangError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    groups[1].close()
    thread.join(20)
    assert len(errors) == 1
    with pytest.raises(StaleCallError, match="was closed"):
        groups[1].all_reduce(torch.ones(1))
    alone = WatchedGroup(SoloGroup(), "actor", Activity())
    alone.close()
    assert alone.all_reduce(torch.ones(1)) == 1


def test_calls_of_an_attempt_that_was_given_up_are_refused() -> None:
    activity = Activity()
    activity.require_current(0)
    activity.attempt = 2
    activity.require_current(2)
    with pytest.raises(StaleCallError, match="attempt 1 was given up"):
        activity.require_current(1)


def test_a_call_within_a_call_gives_the_outer_one_a_new_beginning_and_a_wait_names_whom_it_is_for() -> None:
    activity = Activity()
    with activity.calling("policy.relay"):
        activity._call = ("policy.relay", time.monotonic() - 500)
        with activity.calling("policy.step"):
            assert activity.beat().call == "policy.step"
        assert activity.beat().call == "policy.relay"
        assert activity.beat().call_s < 100
        with activity.awaiting([3, 4]):
            assert Beat.from_dict(json.loads(json.dumps(asdict(activity.beat())))).awaits == (3, 4)
        assert activity.beat().awaits == ()
    assert activity.beat().call == ""
