"""Faults that come once, at a chosen call of a chosen method, in runs of one process."""

from __future__ import annotations

import functools

import pytest

from rlinf_embodied.errors import LostWorkerError, RlinfError


def lost(worker: int = 0) -> RlinfError:
    """Returns what a session says of a worker that is gone."""
    return LostWorkerError(f"worker {worker} died", (worker,))


def once(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, call: int, error: RlinfError, after: bool = False
) -> list[int]:
    """Has the n-th call of a method (from 0) fail, before or after its work; returns what counts the calls."""
    original, calls = getattr(kind, method), []

    @functools.wraps(original)
    def failing(*arguments, **named):
        calls.append(len(calls))
        fails = len(calls) == call + 1
        if fails and not after:
            raise error
        result = original(*arguments, **named)
        if fails:
            raise error
        return result

    monkeypatch.setattr(kind, method, failing)
    return calls
