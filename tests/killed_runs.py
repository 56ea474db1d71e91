"""Runs whose process is killed at a chosen moment, for tests of resuming; imported by those processes, too."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from runs import four, train

from rlinf_embodied.embodied import job as job_module
from rlinf_embodied.embodied.evaluation import Evaluation
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.training import warm_start


def die() -> None:
    """Ends this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def before(place: object, name: str, now: Callable[..., bool]) -> None:
    """Kills this process when a function is called with arguments of which `now` is true."""
    original = getattr(place, name)

    def call(*arguments: object, **options: object) -> object:
        if now(*arguments):
            die()
        return original(*arguments, **options)

    setattr(place, name, call)


def in_clone_write() -> None:
    """Sets the moment at which a clone lies aside, whole, without its name."""
    original = warm_start.write_whole
    warm_start.write_whole = lambda folder, write, marker: original(folder, lambda aside: (write(aside), die()), marker)


# A checkpoint is due after the second and the fourth of four iterations.
MOMENTS: Mapping[str, Callable[[], None]] = {
    "in the warm start": in_clone_write,
    "in the evaluation before": lambda: before(Evaluation, "run", lambda _, step: step == 0),
    "before the first checkpoint": lambda: before(job_module, "run_iteration", lambda _, number, *end: number == 1),
    "in a checkpoint's write": lambda: before(checkpoint, "_seal", lambda folder, step, sequence: step == 4),
    "before a checkpoint has its name": lambda: before(checkpoint, "_install", lambda _, to: to.name == "step_000004"),
    "before latest points to it": lambda: before(checkpoint, "point_latest", lambda to: to.name == "step_000004"),
    "in the iteration after a checkpoint": lambda: before(
        job_module, "run_iteration", lambda _, number, *end: number == 2
    ),
    "in the evaluation after": lambda: before(Evaluation, "run", lambda _, step: step == 4),
}


def _run(folder: Path, cache: Path, overrides: tuple[str, ...], moment: str) -> None:
    os.environ["RLINF_EMBODIED_CACHE"] = str(cache)
    MOMENTS[moment]()
    train(four(folder, *overrides))


def killed_run(folder: Path, cache: Path, moment: str, *overrides: str) -> int | None:
    """Runs `runs.four` in a process of its own, which dies at a moment, and returns its exit code."""
    context = multiprocessing.get_context("forkserver")  # forks of a process that has imported torch, and no threads
    context.set_forkserver_preload(["killed_runs"])
    with pytest.MonkeyPatch.context() as patch:
        tests = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))
        process = context.Process(target=_run, args=(folder, cache, overrides, moment))
        process.start()
    process.join()
    return process.exitcode
