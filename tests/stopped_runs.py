"""Uninterrupted runs to compare with, and interruptions, for the tests of both workflows' trainers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import metric_rows

from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.reasoning.job import ReasoningJob


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


def interrupt_in(monkeypatch: pytest.MonkeyPatch, iteration: int, error: BaseException | None = None) -> None:
    """Ctrl-C arrives while this iteration runs (numbers count from 0); or something fails in it."""

    def interrupted(original: Callable) -> Callable:
        def run(job, executor, progress):
            if progress.iteration == iteration:
                if error is not None:
                    raise error
                signal.raise_signal(signal.SIGINT)
            return original(job, executor, progress)

        return run

    for job in (EmbodiedJob, ReasoningJob):
        monkeypatch.setattr(job, "run_iteration", interrupted(job.run_iteration))


def same_end(folder: Path, other: Path) -> None:
    """Both runs ended with the same weights, moments, stored transitions, counts and metrics."""
    untimed = lambda key: not key.endswith(("_s", "_per_iteration", "plan"))  # noqa: E731
    summary, expected = (
        {key: value for key, value in json.loads((f / "summary.json").read_text()).items() if untimed(key)}
        for f in (folder, other)
    )
    assert summary == expected
    assert metric_rows(folder) == metric_rows(other)
    state, known = (checkpoint.load_state(f / "checkpoints/latest") for f in (folder, other))
    assert state["progress"]["counts"] == known["progress"]["counts"]
    names, expected_names = (
        sorted(path.stem for path in (f / "checkpoints/latest/training_state").iterdir()) for f in (folder, other)
    )
    assert names == expected_names
    for name in names:
        ours, theirs = (checkpoint.load_tensors(f / "checkpoints/latest", name) for f in (folder, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items()), name
    ours, theirs = (sorted((f / "checkpoints/latest").rglob("model.safetensors")) for f in (folder, other))
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]
