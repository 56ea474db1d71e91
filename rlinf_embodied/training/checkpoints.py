"""A run's progress and its checkpoints: the newest one and the best ones.

One for which the disk has no room is noted and tried again after the next iteration.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rlinf_embodied.errors import CheckpointWriteError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.checkpoint import step_folder
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Job, Progress
from rlinf_embodied.training.recovery import Safely
from rlinf_embodied.training.running import Running

_LOG = logging.getLogger(__name__)
_ORIGIN = "origin"  # of a run folder: the checkpoint that its stages were built from
_TRY_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after which the last checkpoint of a run is written again
_BEST = ("best", "best_evaluation")  # of a run's progress: which weights are kept in its folder of the best


class Checkpoints:
    """What one run has learnt, as far as it is kept."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self.progress = Progress()
        self.saved: int | None = None  # the iteration of the newest checkpoint
        self.unwritten: CheckpointWriteError | None = None  # why the newest one is not there
        self._job, self._folder = job, folder
        self._running: Running
        self._safely: Safely

    def serve(self, running: Running, safely: Safely) -> None:
        """Saves these stages from now on; `safely` runs work again where it loses workers."""
        self._running, self._safely = running, safely

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of this progress."""
        return self.saved == self.progress.iteration

    def load(self, executor: Executor, checkpoint: Path) -> None:
        """Brings stages and progress into the state of a checkpoint.

        Raises:
            RlinfError: what a worker raised, or that it was lost.
        """
        self.progress = self._job.load(executor, checkpoint)
        self.saved = self.progress.iteration
        self._forget_best_that_is_gone()

    def advance(self, progress: Progress) -> None:
        """Goes on to the progress at an iteration's end."""
        self.progress = progress
        if self.unwritten is not None:
            self._forget_best_that_is_gone()

    # ------------------------------------------------------------------------------------------------------ writing
    def write(self, executor: Executor, root: Path) -> bool:
        """Has a checkpoint written below a folder of them; returns whether the disk had room.

        A full disk ends no training: it is noted as `unwritten`, and the next iteration's end tries again.

        Raises:
            RlinfError: what a worker raised, or that it was lost.
        """
        target = step_folder(root, self.progress.iteration)
        try:
            self._job.save(executor, root, self.progress)
        except CheckpointWriteError as error:
            _LOG.warning("%s. Training goes on, and tries again after each iteration", error)
            self.saved, self.unwritten = None, error
            self._forget_best(lambda folder: folder == target)
            return False
        return True

    def write_best(self, executor: Executor) -> bool:
        """Has one written that is kept as the best, see `write`."""
        return self.write(executor, self._folder.best)

    # ---------------------------------------------------------------------------------------------- between iterations
    def save(self) -> None:
        """Has a checkpoint written; where the disk is full there is none.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        if self._safely("checkpoint", lambda: self.write(self._running.executor, self._folder.checkpoints)):
            self.saved, self.unwritten = self.progress.iteration, None

    def save_once(self) -> None:
        """Saves, unless there is a checkpoint of this very progress.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        if not self.is_saved:
            self.save()

    def write_at_last(self) -> None:
        """Writes what could not be written before, for about a minute.

        Raises:
            CheckpointWriteError: it cannot be.
            RlinfError: what cannot be recovered from.
        """
        for seconds in _TRY_AGAIN_S:
            if self.unwritten is None:
                return
            time.sleep(seconds)
            self.save()
        if self.unwritten is not None:
            raise self.unwritten

    # --------------------------------------------------------------------------------------------------------- best
    def best_folder(self, best: Mapping[str, float]) -> Path:
        """Returns where the weights are that a run's progress names as its best."""
        return step_folder(self._folder.best, int(best["iteration"]))

    def _forget_best_that_is_gone(self) -> None:
        """Forgets what stayed in the folder of another run, or could not be written."""
        self._forget_best(lambda folder: not folder.exists())

    def _forget_best(self, is_lost: Callable[[Path], bool]) -> None:
        for name in _BEST:
            best = getattr(self.progress, name)
            if best is not None and is_lost(self.best_folder(best)):
                setattr(self.progress, name, None)


# -------------------------------------------------------------------------------------------------------------- origin
def outliving(checkpoint: Path, run: Path) -> Path:
    """Returns a folder with the files of a checkpoint that stays when the run's own old checkpoints are dropped.

    One of another run is not dropped by this one, and stays where it is.  Files are linked where that is possible.
    """
    folder = run / _ORIGIN
    if not checkpoint.resolve().is_relative_to(run.resolve()) or checkpoint.resolve() == folder.resolve():
        return checkpoint
    fresh = run / f".{_ORIGIN}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(checkpoint.resolve(), fresh, copy_function=_link)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
