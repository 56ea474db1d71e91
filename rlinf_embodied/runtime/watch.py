"""Who waits for whom, and whose fault it is: from unanswered calls and heartbeats, as a function of plain values.

driver --> worker 2 (actor.run, in exchange) --> worker 1 (actor.run, waits for its inputs) --> worker 0 (env.step)
             waits for ranks that have            its call's inputs come from calls that         runs, makes no
             not come to the collective           have no answer                                 progress: culprit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.runtime.heartbeat import Beat
from rlinf_embodied.runtime.switchboard import Caller

_STOPPED_S = 10.0  # nobody stops a worker for a good reason
_SETUP = ".setup"  # of a stage
_SLOWER = 2.0  # than ever before: calls differ in length
_PATIENCE = 2.0  # times the limit of a call: who is waited for has to be found first


@dataclass(frozen=True, slots=True)
class Pending:
    """A call without an answer."""

    number: int  # in the order of submission
    worker: int
    call: str  # for people: "env.step (iteration 3, blocks 0-1)"
    since: float  # seconds, monotonic
    inputs: tuple[int, ...] = ()  # the numbers of the calls whose results it takes


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    hang_after_s: float = 30.0  # beyond the longest time without progress so far
    call_timeout_s: float = 600.0  # of a single call


@dataclass(slots=True)
class History:
    """The longest times without progress, by stage and method, over all workers.

    A method that was taken for one that hangs counts, too: it gets more time when it is called again, or one that is
    only slow would be given up each time.
    """

    longest_s: dict[str, float] = field(default_factory=dict)

    def learn(self, beats: Sequence[Beat]) -> None:
        """Takes what workers tell."""
        for beat in beats:
            if beat.longest_s is not None:
                self.longest_s[beat.step] = max(self.longest_s.get(beat.step, 0.0), beat.longest_s)

    def suspect(self, beats: Sequence[Beat]) -> None:
        """Takes what workers tell that are given up."""
        for beat in beats:
            if beat.step:
                self.longest_s[beat.step] = max(self.longest_s.get(beat.step, 0.0), beat.step_s)

    def limit(self, beat: Beat, limits: Limits) -> float:
        """Returns how long a worker's method may take without progress.

        One that has not ended in its process yet, as long as a call: the first time it may have to import and compile.
        So may `setup`: what it has to load depends on which other stages its worker hosts.
        """
        if beat.longest_s is None or beat.step.endswith(_SETUP):
            return limits.call_timeout_s
        longest = max(beat.longest_s, self.longest_s.get(beat.step, 0.0))
        return min(limits.call_timeout_s, limits.hang_after_s + _SLOWER * longest)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong."""

    culprits: tuple[int, ...]
    told: str


def diagnose(
    pending: Sequence[Pending],
    callers: Mapping[int, Caller],
    history: History,
    limits: Limits,
    now: float,
    is_stopped: Callable[[Caller], bool],
) -> Trouble | None:
    """Returns who hangs and who waits for that; None while everything gets on.

    Args:
        pending: calls without an answer, in the order of their submission.
        callers: the workers that were asked, by number.
        history: of earlier calls.
        limits: of the config.
        now: seconds, monotonic.
        is_stopped: whether a worker's process is stopped, as far as can be seen from here.
    """
    first: dict[int, Pending] = {}
    for call in pending:
        first.setdefault(call.worker, call)
    worker_of = {call.number: call.worker for call in pending}
    makers = {w: sorted({worker_of[n] for n in call.inputs if n in worker_of} - {w}) for w, call in first.items()}
    found = {}
    for worker, call in first.items():
        why = _fault(call, callers.get(worker), history, limits, now, is_stopped, bool(makers[worker]))
        if why:
            found[worker] = why
    if not found:
        return None
    lines = [f"{_name(worker, callers)} {why}" for worker, why in sorted(found.items())]
    waits = [_wait(call, makers[worker], callers) for worker, call in first.items() if worker not in found]
    return Trouble(tuple(sorted(found)), "\n".join([*lines, *filter(None, waits)]))


def _fault(
    call: Pending,
    caller: Caller | None,
    history: History,
    limits: Limits,
    now: float,
    is_stopped: Callable[[Caller], bool],
    is_waiting: bool,
) -> str:
    """Returns what is wrong with a worker, "" if it gets on or waits for others."""
    waited = now - call.since
    if caller is None:
        late = waited > limits.call_timeout_s
        return f"has not started within {waited:.0f} s (cluster.call_timeout_s), asked for {call.call}" if late else ""
    if caller.silent_since is not None:
        return _silence(call, caller, history, limits, now - caller.silent_since, is_stopped)
    beat = caller.beat
    if beat is None or any(meeting.waits for meeting in beat.meetings.values()):
        return ""
    if beat.awaits:
        late = beat.call_s > _PATIENCE * limits.call_timeout_s
        return f"waits in {beat.call} for {beat.call_s:.0f} s, and nobody is at fault" if late else ""
    if not beat.call:
        late = not is_waiting and waited > limits.call_timeout_s
        return f"has not begun {call.call} within {waited:.0f} s (cluster.call_timeout_s)" if late else ""
    if beat.call_s > limits.call_timeout_s:
        return f"is in {beat.call} for {beat.call_s:.0f} s (cluster.call_timeout_s={limits.call_timeout_s:g})"
    limit = history.limit(beat, limits)
    if beat.step and beat.step_s > limit:
        longest = history.longest_s.get(beat.step, 0.0)
        return (
            f"makes no progress in {beat.call}: {beat.step} runs for {beat.step_s:.0f} s, and took {longest:.1f} s at "
            f"most before (cluster.hang_after_s={limits.hang_after_s:g})"
        )
    return ""


def _silence(
    call: Pending,
    caller: Caller,
    history: History,
    limits: Limits,
    silent_s: float,
    is_stopped: Callable[[Caller], bool],
) -> str:
    if is_stopped(caller):
        late = silent_s > min(_STOPPED_S, limits.hang_after_s)
        return f"is stopped (SIGSTOP) for {silent_s:.0f} s, asked for {call.call}" if late else ""
    limit = limits.call_timeout_s if caller.beat is None else history.limit(caller.beat, limits)
    if silent_s <= limit:
        return ""
    return f"answers nothing for {silent_s:.0f} s, asked for {call.call}: C code in it keeps the interpreter's lock"


def _wait(call: Pending, makers: Sequence[int], callers: Mapping[int, Caller]) -> str:
    """Returns whom a worker waits for, "" if it waits for nobody."""
    caller = callers.get(call.worker)
    if caller is None or caller.beat is None:
        return ""
    for stage, meeting in caller.beat.meetings.items():
        if meeting.waits:
            others = ", ".join(_missing(stage, meeting.entered, callers)) or "the network"
            return f"{caller} waits in {meeting.waits} of {call.call} for {others}"
    if caller.beat.awaits:
        return (
            f"{caller} waits for {', '.join(_name(worker, callers) for worker in caller.beat.awaits)}, in {call.call}"
        )
    if caller.beat.call or not makers:
        return ""
    return f"{caller} waits for {', '.join(_name(worker, callers) for worker in makers)}, to begin {call.call}"


def _missing(stage: str, entered: int, callers: Mapping[int, Caller]) -> list[str]:
    """Returns the members of a stage's group that have not come to its collective, with their ranks."""
    found = []
    for caller in callers.values():
        meeting = caller.beat.meetings.get(stage) if caller.beat is not None else None
        if meeting is not None and (meeting.entered < entered or caller.silent_since is not None or caller.gone):
            found.append(f"{caller}, rank {meeting.rank}")
    return found


def _name(worker: int, callers: Mapping[int, Caller]) -> str:
    return str(callers.get(worker, f"worker {worker}"))
