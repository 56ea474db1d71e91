"""Diagnoses which worker hangs and which ones wait for it, from unanswered calls and health checks.

driver --> worker 2 (actor.run, in exchange) --> worker 1 (actor.run, waits for its inputs) --> worker 0 (env.step)
             waits for the ranks that have        its inputs come from calls that have not      makes no progress:
             not entered the collective           returned yet                                  the culprit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.runtime.worker_state import Status

_STOPPED_S = 10.0  # nobody stops a worker for a good reason
_HELD = "the machine is busy, or on a cluster another run holds its device (`ray status` shows it)"
_SLOWER = 2.0  # than ever before: calls differ in length


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that has not returned yet."""

    number: int  # in the order of submission
    worker: int
    call: str  # for messages: "env.step (iteration 3, blocks 0-1)"
    since: float  # seconds, monotonic
    inputs: tuple[int, ...] = ()  # the numbers of the calls whose results it takes
    results: tuple[bytes, ...] = ()  # Ray's ids of its results


@dataclass(slots=True)
class Watched:
    """The observed state of a worker."""

    worker: int
    pid: int = 0  # 0: it has not started yet
    node: str = ""  # the name of its machine
    status: Status | None = None  # the newest answer
    silent_since: float | None = None  # seconds, monotonic: when the first health check without an answer was sent
    stopped_since: float | None = None  # seconds, monotonic: when its process was first seen stopped (SIGSTOP)

    def __str__(self) -> str:
        return f"worker {self.worker} (pid {self.pid}, {self.node})" if self.pid else f"worker {self.worker}"

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other workers, in a collective or for results of its calls."""
        status = self.status
        return status is not None and bool(status.awaits or any(group.waits_in for group in status.groups.values()))


@dataclass(slots=True)
class History:
    """The limits that define a hang, and the longest times without progress by stage and method, over all workers."""

    hang_after_s: float = 25.0  # limit without progress, in addition to twice the longest time so far
    first_progress_s: float = 600.0  # limit before the first progress: starts, set-ups and first calls
    longest_s: dict[str, float] = field(default_factory=dict)
    waiting: object = None  # the state in which all workers wait for each other ...
    waiting_since: float = 0.0  # ... and when it was first observed

    def note(self, step: str, seconds: float | None) -> None:
        """Records a time without progress, even of an abandoned call: a method that is only slow gets more time."""
        if step and seconds is not None:
            self.longest_s[step] = max(self.longest_s.get(step, 0.0), seconds)

    def limit(self, status: Status | None) -> float:
        """Returns the limit of a method's time without progress, in seconds.

        Before its first progress in a process a method may have to import and compile.  This limit always applies to
        `setup`, since what it loads depends on the other stages of its worker.
        """
        if status is None or status.longest_s is None or status.step.endswith(".setup"):
            return self.first_progress_s
        return self.hang_after_s + _SLOWER * max(status.longest_s, self.longest_s.get(status.step, 0.0))


@dataclass(frozen=True, slots=True)
class Trouble:
    """The workers that hang, and a message that also names those that wait for them."""

    culprits: tuple[int, ...]
    message: str


def diagnose(
    pending: Sequence[Pending], workers: Mapping[int, Watched], history: History, now: float
) -> Trouble | None:
    """Returns the workers that hang and a message about them; None while everything makes progress."""
    first: dict[int, Pending] = {}
    for call in pending:
        first.setdefault(call.worker, call)
    worker_of = {call.number: call.worker for call in pending}
    sources = {w: sorted({worker_of[n] for n in call.inputs if n in worker_of} - {w}) for w, call in first.items()}
    watched = {worker: workers.get(worker, Watched(worker)) for worker in first}
    reasons = {w: _fault(call, watched[w], history, now, bool(sources[w])) for w, call in first.items()}
    culprits = {w: reason for w, reason in reasons.items() if reason} or _deadlock(watched, sources, history, now)
    if not culprits:
        return None
    lines = [f"{watched[worker]} {reason}" for worker, reason in sorted(culprits.items())]
    waits = [_wait(call, sources[w], watched[w], workers) for w, call in first.items() if not reasons[w]]
    return Trouble(tuple(sorted(culprits)), "\n".join([*lines, *filter(None, waits)]))


def _fault(call: Pending, of: Watched, history: History, now: float, has_makers: bool) -> str:
    """Returns why a worker is a culprit, "" if it makes progress or waits for others."""
    waited, status, limit = now - call.since, of.status, history.limit(of.status)
    first = f"within {waited:.0f} s (cluster.first_progress_s={history.first_progress_s:g})"
    if of.stopped_since is not None:
        stopped_s = now - of.stopped_since
        late = stopped_s > min(_STOPPED_S, history.hang_after_s)
        return f"is stopped (SIGSTOP) for {stopped_s:.0f} s, asked for {call.call}" if late else ""
    if not of.pid:
        return f"has not started {first}: {_HELD}" if waited > history.first_progress_s else ""
    if of.silent_since is not None:
        silent_s = now - of.silent_since
        cause = "C code in it holds the interpreter's lock, or its node is gone"
        return f"does not answer for {silent_s:.0f} s, asked for {call.call}: {cause}" if silent_s > limit else ""
    if status is None or of.is_waiting:
        return ""
    if not status.call:
        late = not has_makers and waited > history.first_progress_s
        return f"has not begun {call.call} {first}" if late else ""
    if not status.step or status.step_s <= limit:
        return ""
    longest = max(status.longest_s or 0.0, history.longest_s.get(status.step, 0.0))
    return (
        f"makes no progress in {status.call}: {status.step} has made none for {status.step_s:.0f} s, and never "
        f"took longer than {longest:.1f} s before (cluster.hang_after_s={history.hang_after_s:g})"
    )


def _deadlock(
    known: Mapping[int, Watched], makers: Mapping[int, Sequence[int]], history: History, now: float
) -> dict[int, str]:
    """Returns all workers if each of them has waited for another one for too long, without any progress."""
    waits = [of.is_waiting or (makers[w] and of.status and not of.status.call) for w, of in known.items()]
    state = [(w, of.status.call, of.status.groups) for w, of in known.items() if of.status] if all(waits) else None
    if not state or state != history.waiting:
        history.waiting, history.waiting_since = state, now
        return {}
    waited = now - history.waiting_since
    if waited <= history.first_progress_s:
        return {}
    return dict.fromkeys(known, f"has waited for another worker for {waited:.0f} s, and so have all the others")


def _wait(call: Pending, makers: Sequence[int], of: Watched, workers: Mapping[int, Watched]) -> str:
    """Returns a message about the workers for which a worker waits, "" if it waits for none."""
    if of.status is None:
        return ""
    for stage, group in of.status.groups.items():
        if group.waits_in:
            others = ", ".join(_missing(stage, group.entered, workers)) or "the network"
            return f"{of} waits in {group.waits_in} of {call.call} for {others}"
    names = ", ".join(str(workers.get(number, Watched(number))) for number in of.status.awaits or makers)
    if of.status.awaits:
        return f"{of} waits for {names}, in {call.call}"
    return "" if of.status.call or not makers else f"{of} waits for {names}, to begin {call.call}"


def _missing(stage: str, entered: int, workers: Mapping[int, Watched]) -> list[str]:
    """Returns the members of a stage's group that have not entered its collective, with their ranks."""
    missing = []
    for of in workers.values():
        group = of.status.groups.get(stage) if of.status is not None else None
        if group is not None and (group.entered < entered or of.silent_since is not None):
            missing.append(f"{of}, rank {group.rank}")
    return missing
