"""Uninterrupted runs to compare with, and interruptions, for the tests of both workflows' trainers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def straight_runs(tmp_path_factory, train: Callable[[Path, str], object], first: str) -> Callable[..., Path]:
    """Returns what gives the folder of a variant's uninterrupted run, made once by `train(folder, variant)`."""
    made: dict[str, Path] = {}

    def folder(variant: str = first) -> Path:
        if variant not in made:
            target = tmp_path_factory.mktemp("straight")
            train(target, variant)
            made[variant] = target
        return made[variant]

    folder()  # before any test forbids sessions
    return folder


def interrupt_in(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, iteration: int, error: BaseException | None = None
) -> None:
    """Ctrl-C arrives while a job's module runs this iteration (numbers count from 0); or something fails in it."""
    original = module.run_iteration

    def run(executor, number, *arguments):
        if number == iteration:
            if error is not None:
                raise error
            signal.raise_signal(signal.SIGINT)
        return original(executor, number, *arguments)

    monkeypatch.setattr(module, "run_iteration", run)
