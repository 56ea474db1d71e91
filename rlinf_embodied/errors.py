"""The error tree: one class per cause, so that callers can tell user input from a broken machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RlinfError(Exception):
    """Any error that this project raises on purpose; the message names the value, the rule and the next action."""


class ConfigError(RlinfError):
    """The configuration is wrong; nothing expensive has started yet."""


class PlanError(RlinfError):
    """A plan does not fit the workflow or the cluster."""


class CheckpointError(RlinfError):
    """A checkpoint is missing, damaged, incomplete, or belongs to something else."""


class CheckpointWriteError(RlinfError):
    """A checkpoint could not be written, and was removed again; older ones are untouched."""


class RunFileError(RlinfError):
    """A file of the run's own folder, such as its metrics, cannot be written; checkpoints before that are whole."""


class DataError(RlinfError):
    """A dataset is missing or empty, one of its records cannot be used, or there is nothing to learn from it."""


class SimulatorError(RlinfError):
    """A simulator cannot be built, or refused its input."""


class ObjectiveError(RlinfError):
    """Training would compute something else than was asked for, for example a ratio that is not 1 at the start."""


class ServerError(RlinfError):
    """A policy server is gone, or a message between it and a client cannot be used."""


class _FaultError(RlinfError):
    """Tells whose fault it is."""

    def __init__(self, message: str, workers: tuple[int, ...] = ()) -> None:
        """Takes the numbers of the workers at fault, as far as they are known."""
        super().__init__(message)
        self.workers = workers


class WorkerError(_FaultError):
    """A worker died or raised; the message names the worker, its stage and the call."""


class LostWorkerError(WorkerError):
    """The process of a worker is gone, or its node; the message names them and says what it did."""


class LostNodeError(WorkerError):
    """A node is gone with its workers: those that are left have to do with what is left."""


class NoRoomError(WorkerError):
    """A call did not fit into its device's memory; the message names the worker, its stages and what helps."""


class PeerError(WorkerError):
    """A worker could not continue because another one was gone: look for the other's error."""


class StaleCallError(WorkerError):
    """A call of an attempt that was given up; its answer is dropped."""


class SimulatorCallError(WorkerError):
    """A simulator that had been built failed in a call."""


class PlugInError(WorkerError):
    """Code of the user's (an env, a policy, a reward, a source of problems) raised; the message shows where in it."""


class HangError(_FaultError):
    """A wait ran into its limit, or a worker makes no progress; the message says who waits for whom."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names a file that cannot be written in the block, and what to do.

    Raises:
        RunFileError: an OSError was raised.
    """
    try:
        yield
    except OSError as error:
        raise RunFileError(
            f"{path} cannot be written ({error.strerror or error}): free space on the disk of run.dir, for example of "
            "older runs, or see that it may be written, then give the same command again: a training resumes from its "
            "newest checkpoint"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a small file so that readers see the old one or the new one, never half of it; raises as `writing`."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
