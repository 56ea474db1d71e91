"""A run's progress and its checkpoints: the newest one, the one being written, and the best ones.

A worker writes a checkpoint while training continues: `begin` starts it, `wait` waits for it.  One for which the disk
has no room is noted and tried again after the next iteration.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlinf_embodied.errors import CheckpointWriteError, HangError, RlinfError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.checkpoint_writer import step_folder
from rlinf_embodied.runtime.host import StepContext
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
        self.being_written: Path | None = None  # the checkpoint that a worker writes at this moment
        self.unwritten: CheckpointWriteError | None = None  # why the newest one is not there
        self._job, self._folder = job, folder
        self._running: Running
        self._safely: Safely

    def serve(self, running: Running, safely: Safely) -> None:
        """Saves these stages from now on; `safely` runs work again where it loses workers."""
        self._running, self._safely = running, safely

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of this progress, or one is being written."""
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
    def begin(self, executor: Executor, root: Path) -> None:
        """Has a checkpoint begun below a folder of them, once the one before is there.

        Raises:
            RlinfError: what a worker raised, or that it was lost; but a full disk is noted as `unwritten`.
        """
        self.wait(executor)
        target = step_folder(root, self.progress.iteration)
        with self._outliving_a_full_disk(target):
            self._job.save(executor, root, self.progress)
            self.being_written = target

    def begin_best(self, executor: Executor) -> None:
        """Has one begun that is kept as the best, see `begin`."""
        self.begin(executor, self._folder.best)

    def begin_again(self, executor: Executor) -> None:
        """Has the one under way begun again, where its worker may be lost and the stages are as they were then."""
        if self.being_written is not None:
            root, self.being_written = self.being_written.parent, None
            self.begin(executor, root)

    def wait(self, executor: Executor) -> None:
        """Returns when the checkpoint under way is written, which a worker does while training continues.

        Raises:
            RlinfError: what a worker raised, or that it was lost; but a full disk is noted as `unwritten`.
        """
        with self._outliving_a_full_disk(self.being_written):
            executor.call(self._job.learner, "wait_saved", StepContext(self.progress.iteration))
            self.being_written = None

    @contextmanager
    def _outliving_a_full_disk(self, target: Path | None) -> Iterator[None]:
        """A checkpoint that cannot be written ends no training: the next iteration's end tries again."""
        try:
            yield
        except CheckpointWriteError as error:
            _LOG.warning("%s. Training goes on, and tries again after each iteration", error)
            self.being_written, self.saved, self.unwritten = None, None, error
            self._forget_best(lambda folder: folder == target)

    # ---------------------------------------------------------------------------------------------- between iterations
    def save(self) -> None:
        """Has a checkpoint begun; where the disk is full there is none.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._safely("checkpoint", lambda: self.begin(self._running.executor, self._folder.checkpoints))
        if self.being_written is not None:
            self.saved, self.unwritten = self.progress.iteration, None

    def save_once(self) -> None:
        """Saves, unless there is a checkpoint of this very progress.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        if not self.is_saved:
            self.save()

    def settle(self) -> None:
        """Returns when nothing is being written.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._safely("checkpoint", lambda: self.wait(self._running.executor))

    def settle_at_last(self) -> None:
        """As `settle`, and writes what could not be written before, for about a minute.

        Raises:
            CheckpointWriteError: it cannot be.
            RlinfError: what cannot be recovered from.
        """
        self.settle()
        for seconds in _TRY_AGAIN_S:
            if self.unwritten is None:
                return
            time.sleep(seconds)
            self.save()
            self.settle()
        if self.unwritten is not None:
            raise self.unwritten

    @contextmanager
    def saved_at_last(self) -> Iterator[None]:
        """Behind it nothing is being written, also where training failed: the run resumes from that checkpoint.

        Raises:
            CheckpointWriteError: what was learnt last cannot be written.
            RlinfError: what cannot be recovered from.
        """
        try:
            yield
        except HangError:  # whoever would have to answer does not
            raise
        except Exception:
            try:
                self.wait(self._running.executor)
            except RlinfError as error:  # the worker that writes may be the one that is gone
                _LOG.warning("the newest checkpoint may be the one before: %s", error)
            raise
        self.settle_at_last()

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
