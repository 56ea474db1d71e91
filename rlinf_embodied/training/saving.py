"""Has checkpoints written between iterations: again where workers are lost in it, and where a disk was full."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf_embodied.errors import HangError, RlinfError
from rlinf_embodied.training.checkpoints import Checkpoints
from rlinf_embodied.training.recovery import Safely
from rlinf_embodied.training.running import Running

_LOG = logging.getLogger(__name__)
_TRY_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after which the last checkpoint of a run is written again


class Saving:
    """Saves one training below one folder."""

    def __init__(self, checkpoints: Checkpoints, running: Running, root: Path, safely: Safely) -> None:
        """Takes what is saved, the stages that write it, the folder of checkpoints, and what outlives lost workers."""
        self._checkpoints, self._running, self._root, self._safely = checkpoints, running, root, safely

    def save(self) -> None:
        """Has a checkpoint begun; where the disk is full there is none.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        checkpoints = self._checkpoints
        self._safely("checkpoint", lambda: checkpoints.begin(self._running.executor, self._root))
        if checkpoints.being_written is not None:
            checkpoints.saved, checkpoints.unwritten = checkpoints.progress.iteration, None

    def save_once(self) -> None:
        """Saves, unless there is a checkpoint of this very progress.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        if not self._checkpoints.is_saved:
            self.save()

    def settle(self) -> None:
        """Returns when nothing is being written.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._safely("checkpoint", lambda: self._checkpoints.wait(self._running.executor))

    def settle_at_last(self) -> None:
        """As `settle`, and writes what could not be written before, as long as that may help.

        Raises:
            CheckpointWriteError: it cannot be.
            RlinfError: what cannot be recovered from.
        """
        self.settle()
        for seconds in _TRY_AGAIN_S:
            if self._checkpoints.unwritten is None:
                return
            time.sleep(seconds)
            self.save()
            self.settle()
        if self._checkpoints.unwritten is not None:
            raise self._checkpoints.unwritten

    @contextmanager
    def saved_at_last(self) -> Iterator[None]:
        """Behind it nothing is being written, also where training failed: the run goes on from that checkpoint.

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
                self._checkpoints.wait(self._running.executor)
            except RlinfError as error:  # the worker that writes may be the one that is gone
                _LOG.warning("the newest checkpoint may be the one before: %s", error)
            raise
        self.settle_at_last()
