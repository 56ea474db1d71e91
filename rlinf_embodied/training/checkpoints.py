"""A run's progress and its checkpoints: the newest one, the one being written, and the best one.

A worker writes a checkpoint while training continues: `begin` starts it, `wait` waits for it.  One for which the disk
has no room is noted and tried again after the next iteration.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlinf_embodied.errors import CheckpointWriteError, HangError, RlinfError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.checkpoint_writer import arrived, step_folder
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Job, Progress
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.training.running import Running

_LOG = logging.getLogger(__name__)
_ORIGIN = "origin"  # of a run folder: the checkpoint that its stages were built from


class Checkpoints:
    """What one run has learnt, as far as it is kept.

    Its methods raise a worker's errors; those in the last section are repeated where a worker is lost.
    """

    def __init__(self, job: Job, folder: RunFolder, running: Running, recovery: Recovery) -> None:
        self.progress = Progress()
        self.saved: int | None = None  # the iteration of the newest checkpoint
        self.being_written: Path | None = None  # the checkpoint that a worker writes at this moment
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
    def begin(self, root: Path) -> None:
        """Has a checkpoint begun below a folder of them, once the one before is there."""
        self.wait()
        target = step_folder(root, self.progress.iteration)
        with self._outliving_a_full_disk(target):
            self._job.save(self._running.executor, root, self.progress)
            self.being_written = target

    def begin_best(self) -> None:
        """Has one begun that is kept as the best."""
        self.begin(self._folder.best)

    def begin_again(self) -> None:
        """Has the one under way begun again, where its worker may be lost and the stages are as they were then."""
        if self.being_written is not None:
            root, self.being_written = self.being_written.parent, None
            self.begin(root)

    def wait(self) -> None:
        """Returns when the checkpoint under way is on the driver's disk.

        One that was written on another node is brought from there, where a copy stays.  What fails on the way leaves a
        checkpoint that is damaged, which a resuming run passes over.
        """
        executor, learner = self._running.executor, self._job.learner
        with self._outliving_a_full_disk(self.being_written):
            executor.call(learner, "wait_saved", StepContext(self.progress.iteration))
            if self.being_written is not None:
                if executor.collect(learner, self.being_written, of_first=True):
                    arrived(self.being_written, self._job.config.checkpoint.keep)
                self.being_written = None

    @contextmanager
    def _outliving_a_full_disk(self, target: Path | None) -> Iterator[None]:
        """A checkpoint that cannot be written ends no training: the next iteration's end tries again."""
        try:
            yield
        except CheckpointWriteError as error:
            _LOG.warning("%s. Training continues, and tries again after each iteration", error)
            self.being_written, self.saved, self.unwritten = None, None, error
            if self.progress.best is not None and self.best_folder(self.progress.best) == target:
                self.progress.best = None

    # ---------------------------------------------------------------------------------------------- between iterations
    def save(self) -> None:
        """Has a checkpoint begun; where the disk is full there is none."""
        self._recovery.repeat("checkpoint", lambda: self.begin(self._folder.checkpoints))
        if self.being_written is not None:
            self.saved, self.unwritten = self.progress.iteration, None

    def save_once(self) -> None:
        """Saves, unless there is a checkpoint of this very progress."""
        if self.saved != self.progress.iteration:
            self.save()

    def settle(self) -> None:
        """Returns when nothing is being written."""
        self._recovery.repeat("checkpoint", self.wait)

    def settle_at_last(self) -> None:
        """As `settle`, and tries once more to write what could not be written before.

        Raises:
            CheckpointWriteError: it cannot be.
        """
        self.settle()
        if self.unwritten is not None:
            self.save()
            self.settle()
        if self.unwritten is not None:
            raise self.unwritten

    @contextmanager
    def saved_at_last(self) -> Iterator[None]:
        """Behind it nothing is being written, also where training failed: the run resumes from that checkpoint.

        Raises:
            CheckpointWriteError: what was learnt last cannot be written.
        """
        try:
            yield
        except HangError:  # whoever would have to answer does not
            raise
        except Exception:
            try:
                self.wait()
            except RlinfError as error:  # the worker that writes may be the one that is gone
                _LOG.warning("the newest checkpoint may be the one before: %s", error)
            raise
        self.settle_at_last()


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
