"""Ctrl-C and SIGTERM: requests to stop, each with its own exit code (128 + number: 130, 143).

    ends_at_once     the first signal raises Stopped immediately: a checkpoint would hold nothing more
    ends_when_asked  the first signal is recorded, and the running iteration is finished; the second one raises Stopped
    in both          another signal during the clean-up of workers and files ends the process at once

Signals that are ignored when the process starts stay ignored, as shells without job control intend.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NAMES = {signal.SIGINT: "interrupt", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """A signal requested to stop at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code by which shells and schedulers recognise the signal."""
        return 128 + self.number

    def __str__(self) -> str:
        """Returns the predicate of a sentence about the run, such as "interrupted"."""
        return "interrupted" if self.number == signal.SIGINT else f"stopped by {signal.Signals(self.number).name}"


@dataclass(slots=True)
class StopRequest:
    """Whether a stop was requested, and by which signal."""

    number: int | None = None  # of the first signal

    @property
    def asked(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or signal.SIGINT)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Makes a signal within the block raise Stopped in the main thread, so that workers are ended and files closed."""
    raised = False

    def handle(number: int, frame: object) -> None:
        nonlocal raised
        if raised:
            os._exit(128 + number)
        raised = True
        raise Stopped(number)

    with _handling(handle):
        yield


@contextmanager
def ends_when_asked() -> Iterator[StopRequest]:
    """Makes the first signal within the block a request to stop, and the second one raise Stopped."""
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if request.asked:
            raise Stopped(number)
        request.number = number
        name = _NAMES[signal.Signals(number)]
        text = f"\n{name}: finishing this iteration, then writing a checkpoint (again: stop at once)\n"
        with contextlib.suppress(OSError, ValueError):  # bypasses the stream's buffer, which may be half written
            os.write(sys.stdout.fileno(), text.encode())

    with _handling(handle):
        yield request


@contextmanager
def _handling(handle: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _NAMES}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
