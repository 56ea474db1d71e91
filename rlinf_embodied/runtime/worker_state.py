"""The state of a worker, written by the thread that runs its calls and read by the one that answers health checks."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rlinf_embodied.errors import StaleCallError
from rlinf_embodied.telemetry.progress import progress_reported_to


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's progress in the collectives of one stage."""

    rank: int
    entered: int = 0  # operations that it has entered, counted from 1
    waits_in: str = ""  # the operation in which it waits for the other members: "exchange"; "": none


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to a health check: for example "env.loop (iteration 3, blocks 0-1)", in "env.step" for 0.2 s."""

    call: str = ""  # "": the worker is idle
    step: str = ""  # the running method of a stage
    step_s: float = 0.0  # since that method began or last made progress
    longest_s: float | None = None  # without progress in this method so far; None: it has made none in this process
    groups: dict[str, Membership] = field(default_factory=dict)  # by stage
    awaits: tuple[int, ...] = ()  # workers whose answers it waits for
    stack: str = ""  # of the thread that runs the call, if requested


class WorkerState:
    """The state of a worker; it starts idle, in the first attempt."""

    def __init__(self) -> None:
        self.attempt = 0  # calls of older attempts are refused
        self._lock = threading.Lock()  # of the attempt
        self._call, self._step = "", ("", 0.0)  # the step, and since when it makes no progress
        self._longest: dict[str, float] = {}  # by step
        self._groups: dict[str, Membership] = {}
        self._awaits: tuple[int, ...] = ()
        self._thread = 0

    def begin(self, attempt: int) -> None:
        """Begins a call of an attempt; calls of older ones are refused from then on, by a StaleCallError."""
        with self._lock:
            self.require_current(attempt)
            self.attempt = attempt

    def abandon(self, attempt: int) -> None:
        """Abandons the calls of all attempts before this one."""
        with self._lock:
            self.attempt = max(self.attempt, attempt)

    def require_current(self, attempt: int) -> None:
        """Raises a StaleCallError if the attempt was abandoned."""
        if attempt < self.attempt:
            raise StaleCallError(f"attempt {attempt} was abandoned, attempt {self.attempt} runs")

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        outer, self._call = self._call, call
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._call = outer

    @contextmanager
    def stepping(self, step: str) -> Iterator[None]:
        """Records a stage's method while it runs, and its reports of progress."""
        before, self._step = self._step, (step, time.monotonic())
        try:
            with progress_reported_to(self.progress):
                yield
            self.progress()
        finally:
            self._step = before

    @contextmanager
    def awaiting(self, workers: Sequence[int]) -> Iterator[None]:
        """Records that the worker waits for results of other workers that it has called."""
        self._awaits = tuple(workers)
        try:
            yield
        finally:
            self._awaits = ()

    @contextmanager
    def meeting(self, stage: str, operation: str) -> Iterator[None]:
        """Records a collective while the worker waits in it."""
        membership = replace(self._groups[stage], entered=self._groups[stage].entered + 1)
        self._groups = self._groups | {stage: replace(membership, waits_in=operation)}
        try:
            yield
            self.progress()
        finally:
            self._groups = self._groups | {stage: membership}

    def join(self, stage: str, rank: int) -> None:
        self._groups = self._groups | {stage: Membership(rank)}

    def leave_groups(self) -> None:
        self._groups = {}

    def progress(self) -> None:
        """Records that the running method makes progress."""
        step, since = self._step
        if step:
            now = time.monotonic()
            self._longest[step] = max(self._longest.get(step, 0.0), now - since)
            self._step = (step, now)

    def status(self, stack: bool = False) -> Status:
        """Returns the present status, with the stack of the thread that runs the call if requested."""
        (step, since), call = self._step, self._call
        step_s = time.monotonic() - since if step else 0.0
        frame = sys._current_frames().get(self._thread) if stack and call else None
        text = "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
        return Status(call, step, step_s, self._longest.get(step), self._groups, self._awaits, text)
