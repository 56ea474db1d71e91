"""What a worker does at the moment, told on request by a thread of its own, beside the calls.

    calls' thread    WorkerHost, groups --note--> Activity                      never waits
    pulse's thread   Pulse  <--{"ask": 7}-- driver;  --{"answer": 7, ...}-->    blocks in reading a socket

The socket says three things: an answer (alive, and what it does), silence (stopped, or held in C code that keeps the
interpreter's lock: the driver looks at the process) and its end (the process is gone; the kernel closes sockets).
One JSON object per line; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

from rlinf_embodied.errors import StaleCallError

_CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """How far a worker is in the collectives of one stage."""

    rank: int
    size: int
    entered: int = 0  # operations that it has come to, counted from 1
    waits: str = ""  # the operation in which it waits for the others: "exchange"; "": none


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker tells, for example "env.loop (iteration 3, blocks 0-1)", at "env.step" for 0.2 s."""

    call: str = ""  # "": it waits for a call
    call_s: float = 0.0  # since the call began
    step: str = ""  # the stage's method that runs
    step_s: float = 0.0  # without progress: since the method began, or the last collective was over
    longest_s: float | None = None  # without progress in this method before; None: it never ended yet
    meetings: dict[str, Meeting] = field(default_factory=dict)  # by stage
    stack: str = ""  # of the thread that runs the call, where it was asked for
    awaits: tuple[int, ...] = ()  # workers that it has called itself, and whose answers it waits for

    @classmethod
    def from_dict(cls, content: dict) -> Beat:
        """Returns the beat of its JSON form."""
        meetings = {stage: Meeting(**told) for stage, told in content.pop("meetings").items()}
        return cls(**{**content, "awaits": tuple(content["awaits"])}, meetings=meetings)


class Activity:
    """What a worker does; written by the thread that runs calls, read by any."""

    def __init__(self) -> None:
        self.attempt = 0  # calls of older ones are not wanted any more
        self._call, self._step = ("", 0.0), ("", 0.0)  # what, and since when
        self._longest: dict[str, float] = {}
        self._meetings: dict[str, Meeting] = {}
        self._thread = 0
        self._awaits: tuple[int, ...] = ()

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Notes a call for as long as it runs; one that runs within another gives that one a new beginning."""
        (outer, _), self._call = self._call, (call, time.monotonic())
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._call = (outer, time.monotonic()) if outer else ("", 0.0)

    @contextmanager
    def stepping(self, step: str) -> Iterator[None]:
        """Notes a stage's method for as long as it runs."""
        before, self._step = self._step, (step, time.monotonic())
        try:
            yield
            self.progress()
        finally:
            self._step = before

    @contextmanager
    def awaiting(self, workers: Sequence[int]) -> Iterator[None]:
        """Notes that the worker waits for answers of others that it has called."""
        self._awaits = tuple(workers)
        try:
            yield
        finally:
            self._awaits = ()

    def progress(self) -> None:
        """Notes that the method gets on."""
        step, since = self._step
        if not step:
            return
        now = time.monotonic()
        self._longest[step] = max(self._longest.get(step, 0.0), now - since)
        self._step = (step, now)

    def join(self, stage: str, rank: int, size: int) -> None:
        """Notes that the worker is a member of a stage's group."""
        self._meetings = self._meetings | {stage: Meeting(rank, size)}

    @contextmanager
    def meeting(self, stage: str, operation: str) -> Iterator[None]:
        """Notes a collective for as long as it runs."""
        held = self._meetings[stage]
        entered = held.entered + 1
        self._meetings = self._meetings | {stage: Meeting(held.rank, held.size, entered, operation)}
        try:
            yield
            self.progress()
        finally:
            self._meetings = self._meetings | {stage: Meeting(held.rank, held.size, entered)}

    def forget(self) -> None:
        """Leaves all groups."""
        self._meetings = {}

    def require_current(self, attempt: int) -> None:
        """Checks that a call is wanted still.

        Raises:
            StaleCallError: it is of an attempt that was given up.
        """
        if attempt < self.attempt:
            raise StaleCallError(f"attempt {attempt} was given up, it is number {self.attempt}'s turn")

    def beat(self, stack: bool = False) -> Beat:
        """Returns what is known at this moment."""
        now, (call, called), (step, began) = time.monotonic(), self._call, self._step
        return Beat(
            call,
            now - called if call else 0.0,
            step,
            now - began if step else 0.0,
            self._longest.get(step),
            self._meetings,
            self._stack() if stack and call else "",
            self._awaits,
        )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


@dataclass(frozen=True, slots=True)
class Line:
    """Where a worker reports, and as whom."""

    host: str
    port: int
    token: str  # that of the session
    worker: int


class Pulse:
    """The thread that answers the driver."""

    def __init__(self, line: Line, activity: Activity, node: str, abandon: Callable[[int], None]) -> None:
        """Connects and starts.

        Args:
            line: to the driver.
            activity: what is told.
            node: the name of this machine.
            abandon: called with the number of the attempt that is to come: calls of older ones shall end.

        Raises:
            OSError: nobody listens there.
        """
        self._activity, self._abandon = activity, abandon
        self._socket = socket.create_connection((line.host, line.port), _CONNECT_S)
        self._socket.settimeout(None)
        self._send({"token": line.token, "worker": line.worker, "pid": os.getpid(), "node": node})
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _send(self, message: dict) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as lines:  # the driver is gone: Ray ends this process
            for text in lines:
                asked = json.loads(text)
                if "abandon" in asked:
                    self._abandon(asked["abandon"])
                if "ask" in asked:
                    self._send({"answer": asked["ask"], "beat": asdict(self._activity.beat(asked["stack"]))})
