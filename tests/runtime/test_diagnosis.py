"""Whose fault it is, from plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf_embodied.runtime.diagnosis import History, Pending, Trouble, Watched, diagnose
from rlinf_embodied.runtime.worker_state import Membership, Status

NOW = 1000.0


def worker(number: int, status: Status | None, silent_s: float | None = None) -> Watched:
    return Watched(number, 100 + number, "here", status, None if silent_s is None else NOW - silent_s)


def asked(pending: list[Pending], workers: list[Watched], **longest: float) -> Trouble | None:
    history = history_of(**longest)
    return diagnose(pending, {of.worker: of for of in workers}, history, NOW)


def history_of(**longest: float) -> History:
    return History(30.0, 600.0, {name.replace("_", "."): seconds for name, seconds in longest.items()})


def stepping(seconds: float, longest_s: float | None = 0.5) -> Status:
    return Status("env.step (iteration 2)", "env.step", seconds, longest_s)


STEP = Pending(1, 0, "env.step (iteration 2)", NOW - 50)
UPDATE = Pending(2, 1, "actor.run (iteration 2)", NOW - 50, inputs=(1,))


@pytest.mark.parametrize(("seconds", "hangs"), [(33.9, False), (34.1, True)])
def test_a_worker_hangs_when_it_makes_no_progress_for_longer_than_ever_and_the_limit(seconds, hangs) -> None:
    found = asked([STEP], [worker(0, stepping(seconds))], env_step=2.0)  # 30 + 2 * 2
    assert (found is not None) == hangs
    if found is not None:
        assert found.culprits == (0,)
        assert "worker 0 (pid 100, here) makes no progress in env.step (iteration 2)" in found.message


def test_a_call_of_hours_that_makes_progress_is_no_hang() -> None:
    long_ago = replace(STEP, since=NOW - 36_000)
    assert asked([long_ago], [worker(0, stepping(3.0))], env_step=2.0) is None


def test_a_method_that_made_no_progress_in_its_process_yet_may_import_and_compile() -> None:
    assert asked([STEP], [worker(0, stepping(599.0, longest_s=None))], env_step=2.0) is None
    assert asked([STEP], [worker(0, stepping(601.0, longest_s=None))], env_step=2.0) is not None


def test_a_set_up_that_was_short_before_may_load_as_long_as_a_first_one() -> None:
    """What it loads may have been there already, from another stage of the worker."""
    setup = lambda seconds: Status("actor.setup", "actor.setup", seconds, 0.4)  # noqa: E731
    pending = [Pending(1, 0, "actor.setup", NOW - 700)]
    assert asked(pending, [worker(0, setup(599.0))], actor_setup=0.4) is None
    assert asked(pending, [worker(0, setup(601.0))], actor_setup=0.4) is not None


def test_the_chain_leads_from_those_who_wait_to_the_culprit() -> None:
    meeting = {"actor": Membership(0, entered=7, waits_in="exchange")}
    behind = {"actor": Membership(1, entered=6)}
    pending = [STEP, UPDATE, Pending(3, 2, "actor.run (iteration 2)", NOW - 50, inputs=(9,))]
    workers = [
        worker(0, stepping(50.0)),
        worker(1, Status(groups=behind)),
        worker(2, Status("actor.run (iteration 2)", "actor.run", 45.0, 1.0, meeting)),
    ]
    found = asked(pending, workers, env_step=1.0, actor_run=1.0)
    assert found is not None
    assert found.culprits == (0,)
    assert "worker 1 (pid 101, here) waits for worker 0 (pid 100, here), to begin actor.run" in found.message
    assert "worker 2 (pid 102, here) waits in exchange of actor.run (iteration 2) for worker 1" in found.message
    assert "rank 1" in found.message


def test_a_stopped_worker_hangs_and_a_silent_one_may_be_in_c_code() -> None:
    silent = worker(0, stepping(1.0), silent_s=11.0)
    found = asked([STEP], [replace(silent, stopped_since=NOW - 11)], env_step=1.0)
    assert found is not None
    assert "is stopped (SIGSTOP) for 11 s" in found.message
    assert asked([STEP], [silent], env_step=1.0) is None
    held = asked([STEP], [worker(0, stepping(1.0), silent_s=33.0)], env_step=1.0)
    assert held is not None
    assert "holds the interpreter's lock" in held.message


def test_a_worker_that_does_not_begin_is_late_only_when_nobody_keeps_it_waiting() -> None:
    idle = [worker(0, stepping(0.5)), worker(1, Status())]
    late = Pending(2, 1, "actor.run (iteration 2)", NOW - 601, inputs=(1,))
    assert asked([STEP, late], idle, env_step=1.0) is None
    found = asked([late], idle)
    assert found is not None
    assert found.culprits == (1,)
    assert "has not begun actor.run" in found.message
    never = asked([Pending(1, 4, "env.setup", NOW - 601)], [])
    assert never is not None
    assert "worker 4 has not started" in never.message


def test_a_method_that_was_given_up_gets_more_time_the_next_time() -> None:
    history = history_of(env_step=2.0)
    for step, seconds in (("env.step", 40.0), ("env.step", 1.0), ("", 90.0), ("env.step", None)):
        history.note(step, seconds)
    assert history.limit(stepping(0.0)) == 30.0 + 2 * 40.0


RELAY = Pending(3, 1, "policy.relay (iteration 2)", NOW - 900)
CLOSE = Pending(4, 0, "env.close (iteration 2)", NOW - 900, inputs=(3,))


def test_a_worker_that_waits_for_one_that_it_called_is_not_at_fault_and_the_message_says_for_whom() -> None:
    waits = worker(1, Status("policy.relay (iteration 2)", awaits=(0,)))
    found = asked([RELAY, CLOSE], [waits, worker(0, stepping(40.0))], env_step=1.0)
    assert found is not None
    assert found.culprits == (0,)
    assert "worker 1 (pid 101, here) waits for worker 0 (pid 100, here), in policy.relay (iteration 2)" in found.message
    assert asked([RELAY, CLOSE], [waits, worker(0, Status())]) is None  # its step is on the way


def test_workers_that_all_wait_for_each_other_hang_when_nothing_changes() -> None:
    history, workers = history_of(), {1: worker(1, Status("policy.relay", awaits=(0,))), 0: worker(0, Status())}
    asked_at = lambda now: diagnose([RELAY, CLOSE], workers, history, now)  # noqa: E731
    assert asked_at(NOW) is None
    assert asked_at(NOW + 599) is None
    found = asked_at(NOW + 601)
    assert found is not None
    assert found.culprits == (0, 1)
    workers[1].status = Status("policy.relay, the next one", awaits=(0,))
    assert asked_at(NOW + 602) is None
