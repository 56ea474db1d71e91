"""Whose fault it is, from plain values."""

from __future__ import annotations

import socket

import pytest

from rlinf_embodied.runtime.heartbeat import Beat, Meeting
from rlinf_embodied.runtime.switchboard import Caller
from rlinf_embodied.runtime.watch import History, Limits, Pending, Trouble, diagnose

LIMITS = Limits(hang_after_s=30.0, call_timeout_s=600.0)
NOW = 1000.0


def caller(worker: int, beat: Beat | None, silent_s: float | None = None) -> Caller:
    made = Caller(worker, 100 + worker, "here", socket.socket())
    made.line.close()
    made.beat, made.silent_since = beat, None if silent_s is None else NOW - silent_s
    return made


def asked(pending: list[Pending], callers: list[Caller], stopped: bool = False, **longest: float) -> Trouble | None:
    history = History({name.replace("_", "."): seconds for name, seconds in longest.items()})
    known = {caller.worker: caller for caller in callers}
    return diagnose(pending, known, history, LIMITS, NOW, lambda caller: stopped)


def stepping(seconds: float, call_s: float | None = None, longest_s: float | None = 0.5) -> Beat:
    return Beat("env.step (iteration 2)", seconds if call_s is None else call_s, "env.step", seconds, longest_s)


STEP = Pending(1, 0, "env.step (iteration 2)", NOW - 50)
UPDATE = Pending(2, 1, "actor.run (iteration 2)", NOW - 50, inputs=(1,))


@pytest.mark.parametrize(("seconds", "hangs"), [(33.9, False), (34.1, True)])
def test_a_worker_hangs_when_it_makes_no_progress_for_longer_than_ever_and_the_limit(seconds, hangs) -> None:
    found = asked([STEP], [caller(0, stepping(seconds))], env_step=2.0)  # 30 + 2 * 2
    assert (found is not None) == hangs
    if found is not None:
        assert found.culprits == (0,)
        assert "worker 0 (pid 100, here) makes no progress in env.step (iteration 2)" in found.told


def test_a_method_that_never_ended_in_its_process_may_take_as_long_as_a_call() -> None:
    assert asked([STEP], [caller(0, stepping(599.0, longest_s=None))], env_step=2.0) is None
    assert asked([STEP], [caller(0, stepping(601.0, longest_s=None))], env_step=2.0) is not None


def test_a_set_up_that_was_short_before_may_take_as_long_as_a_call() -> None:
    """What it loads may have been there already, from another stage of the worker."""
    setup = lambda seconds: Beat("actor.setup", seconds, "actor.setup", seconds, 0.4)  # noqa: E731
    pending = [Pending(1, 0, "actor.setup", NOW - 700)]
    assert asked(pending, [caller(0, setup(599.0))], actor_setup=0.4) is None
    assert asked(pending, [caller(0, setup(601.0))], actor_setup=0.4) is not None


def test_progress_does_not_prolong_a_call_without_end() -> None:
    found = asked([STEP], [caller(0, stepping(0.1, call_s=601.0))], env_step=2.0)
    assert found is not None
    assert "call_timeout_s=600" in found.told


def test_the_chain_leads_from_those_who_wait_to_the_culprit() -> None:
    meeting = {"actor": Meeting(0, 2, entered=7, waits="exchange")}
    behind = {"actor": Meeting(1, 2, entered=6)}
    pending = [STEP, UPDATE, Pending(3, 2, "actor.run (iteration 2)", NOW - 50, inputs=(9,))]
    callers = [
        caller(0, stepping(50.0)),
        caller(1, Beat(meetings=behind)),
        caller(2, Beat("actor.run (iteration 2)", 45.0, "actor.run", 45.0, 1.0, meeting)),
    ]
    found = asked(pending, callers, env_step=1.0, actor_run=1.0)
    assert found is not None
    assert found.culprits == (0,)
    assert "worker 1 (pid 101, here) waits for worker 0 (pid 100, here), to begin actor.run" in found.told
    assert "worker 2 (pid 102, here) waits in exchange of actor.run (iteration 2) for worker 1" in found.told
    assert "rank 1" in found.told


def test_a_stopped_worker_hangs_and_a_silent_one_may_be_in_c_code() -> None:
    silent = [caller(0, stepping(1.0), silent_s=11.0)]
    found = asked([STEP], silent, stopped=True, env_step=1.0)
    assert found is not None
    assert "is stopped (SIGSTOP) for 11 s" in found.told
    assert asked([STEP], silent, env_step=1.0) is None
    held = asked([STEP], [caller(0, stepping(1.0), silent_s=33.0)], env_step=1.0)
    assert held is not None
    assert "keeps the interpreter's lock" in held.told


def test_a_worker_that_does_not_begin_is_late_only_when_nobody_keeps_it_waiting() -> None:
    idle = [caller(0, stepping(0.5)), caller(1, Beat())]
    late = Pending(2, 1, "actor.run (iteration 2)", NOW - 601, inputs=(1,))
    assert asked([STEP, late], idle, env_step=1.0) is None
    found = asked([late], idle)
    assert found is not None
    assert found.culprits == (1,)
    assert "has not begun actor.run" in found.told
    never = asked([Pending(1, 4, "env.setup", NOW - 601)], [])
    assert never is not None
    assert "worker 4 has not started" in never.told


def test_a_method_that_was_given_up_gets_more_time_the_next_time() -> None:
    history = History({"env.step": 2.0})
    history.suspect([stepping(40.0)])
    assert history.limit(stepping(0.0), LIMITS) == 30.0 + 2 * 40.0
    history.suspect([stepping(1.0), Beat()])
    assert history.limit(stepping(0.0), LIMITS) == 30.0 + 2 * 40.0


RELAY = Pending(3, 1, "policy.relay (iteration 2)", NOW - 900)
CLOSE = Pending(4, 0, "env.close (iteration 2)", NOW - 900, inputs=(3,))


def test_who_waits_for_those_that_it_called_itself_is_not_at_fault_and_says_for_whom() -> None:
    waits = Beat("policy.relay (iteration 2)", 40.0, awaits=(0,))
    found = asked([RELAY, CLOSE], [caller(1, waits), caller(0, stepping(40.0))], env_step=1.0)
    assert found is not None
    assert found.culprits == (0,)
    assert "worker 1 (pid 101, here) waits for worker 0 (pid 100, here), in policy.relay (iteration 2)" in found.told
    assert asked([RELAY, CLOSE], [caller(1, waits), caller(0, Beat())]) is None  # its step is on the way
    lost = Beat("policy.relay (iteration 2)", 1201.0, awaits=(0,))
    found = asked([RELAY, CLOSE], [caller(1, lost), caller(0, Beat())])
    assert found is not None
    assert found.culprits == (1,)
