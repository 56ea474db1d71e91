"""Ctrl-C as a request: the iteration under way is finished and a checkpoint is written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130  # the exit code after Ctrl-C


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asked to stop."""

    asked: bool = False


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Turns the first Ctrl-C into a request; the second one ends the process at once."""
    request = StopRequest()

    def handle(signum: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True
        print("\ninterrupt: finishing this iteration, then writing a checkpoint (again: stop at once)", flush=True)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)
