"""Progress within a long call: loops report every step, which distinguishes a long call from a hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LISTENER: ContextVar[Callable[[], None] | None] = ContextVar("listener", default=None)


def report_progress() -> None:
    """Reports that a step of the running call has ended; does nothing without a listener."""
    listener = _LISTENER.get()
    if listener is not None:
        listener()


@contextmanager
def progress_reported_to(listener: Callable[[], None]) -> Iterator[None]:
    """Calls `listener` at each report of the code inside the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
