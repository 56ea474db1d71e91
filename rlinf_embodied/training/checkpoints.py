"""A run's progress and its checkpoints: the newest one and the best one.

One for which the disk has no room is noted and tried again after the next iteration.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlinf_embodied.errors import CheckpointWriteError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.checkpoint import step_folder
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Job, Progress
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.training.running import Running

_LOG = logging.getLogger(__name__)
_ORIGIN = "origin"  # of a run folder: the checkpoint that its stages were built from


class Checkpoints:
    """What one run has learnt, as far as it is kept; its methods raise a worker's errors."""

    def __init__(self, job: Job, folder: RunFolder, running: Running, recovery: Recovery) -> None:
        self.progress = Progress()
        self.saved: int | None = None  # the iteration of the newest checkpoint
        self.unwritten: CheckpointWriteError | None = None  # why the newest one is not there
        self._job, self._folder, self._running, self._recovery = job, folder, running, recovery

    def load(self, executor: Executor, checkpoint: Path) -> None:
        """Brings stages and progress into the state of a checkpoint."""
        self.progress = self._job.load(executor, checkpoint)
        self.saved = self.progress.iteration
        self._forget_missing_best()

    def advance(self, progress: Progress) -> None:
        """Takes the progress at an iteration's end."""
        self.progress = progress
        if self.unwritten is not None:
            self._forget_missing_best()

    def best_folder(self, best: Mapping[str, float]) -> Path:
        """Returns where the weights are that a run's progress names as its best."""
        return step_folder(self._folder.best, int(best["iteration"]))

    def _forget_missing_best(self) -> None:
        """Forgets a best one that stayed in the folder of another run, or could not be written."""
        if self.progress.best is not None and not self.best_folder(self.progress.best).exists():
            self.progress.best = None

    # ------------------------------------------------------------------------------------------------------ writing
    def write(self, root: Path) -> bool:
        """Has a checkpoint written below a folder of them; returns whether the disk had room.

        A full disk ends no training: it is noted as `unwritten`, and the next iteration's end tries again.
        """
        target = step_folder(root, self.progress.iteration)
        try:
            self._job.save(self._running.executor, root, self.progress)
        except CheckpointWriteError as error:
            _LOG.warning("%s. Training continues, and tries again after each iteration", error)
            self.saved, self.unwritten = None, error
            if self.progress.best is not None and self.best_folder(self.progress.best) == target:
                self.progress.best = None
            return False
        return True

    def write_best(self) -> bool:
        """Has one written that is kept as the best."""
        return self.write(self._folder.best)

    def save(self) -> None:
        """Has a checkpoint written, again if a worker is lost meanwhile; where the disk is full there is none."""
        if self._recovery.repeat("checkpoint", lambda: self.write(self._folder.checkpoints)):
            self.saved, self.unwritten = self.progress.iteration, None

    def save_once(self) -> None:
        """Saves, unless there is a checkpoint of this very progress."""
        if self.saved != self.progress.iteration:
            self.save()

    def write_at_last(self) -> None:
        """Tries once more to write what could not be written before.

        Raises:
            CheckpointWriteError: it cannot be.
        """
        if self.unwritten is not None:
            self.save()
        if self.unwritten is not None:
            raise self.unwritten


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
