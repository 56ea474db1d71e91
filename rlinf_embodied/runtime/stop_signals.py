"""Ctrl-C and SIGTERM: requests to stop, each with its own exit code (128 + number: 130, 143).

    ends_at_once     the first one raises Stopped where the process is: a checkpoint could hold nothing more
    ends_when_asked  the first one is noted, and what is under way is finished; the second one raises Stopped
    in both          another one while workers are ended and files closed leaves that undone

What is ignored when the process starts stays ignored: shells without job control mean it.
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
    """A signal asked for an end at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code by which shells and schedulers know the signal."""
        return 128 + self.number

    def __str__(self) -> str:
        """Returns the end of a sentence."""
        return "interrupted" if self.number == signal.SIGINT else f"stopped by {signal.Signals(self.number).name}"


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asked to stop, and how."""

    number: int | None = None  # of the first signal

    @property
    def asked(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or signal.SIGINT)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it a signal raises Stopped in the main thread, so that workers are ended and files closed."""
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
    """Within it the first signal is a request; the second one raises Stopped."""
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if request.asked:
            raise Stopped(number)
        request.number = number
        name = _NAMES[signal.Signals(number)]
        text = f"\n{name}: finishing this iteration, then writing a checkpoint (again: stop at once)\n"
        with contextlib.suppress(OSError, ValueError):  # past the stream's buffer, which may be half written
            os.write(sys.stdout.fileno(), text.encode())

    with _handling(handle):
        yield request


@contextmanager
def _handling(handle: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _NAMES}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
