"""Checkpoints behind training's back: the caller gives a snapshot, a thread brings it to the disk.

    caller   save(...)     waits for the checkpoint before; has the policy write its own files, which the system takes
                           at memory speed; copies all other tensors; goes on
    thread                 writes the copies, waits for the disk, hashes, seals, renames, drops old checkpoints
    caller   wait()        before anybody reads the checkpoint, and at the end; raises what failed

A process that is asked to exit meanwhile exits when the thread is done, so what was to be saved is saved.

Memory: until the thread is done the process holds one copy of the optimizer's state and of what else a checkpoint has
beside the policy, on the CPU; the policy's files are in the system's cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from rlinf_embodied.learning import checkpoint
from rlinf_embodied.learning.checkpoint import Draft

_LOG = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint at a time; belongs to the one worker that writes a run's checkpoints."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        root: Path,
        step: int,
        *,
        policy_writer: Callable[[Path], None],
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, object],
        keep: int = 3,
    ) -> None:
        """Takes a snapshot and returns; arguments as `checkpoint.save`, and what they refer to may change from then on.

        Raises:
            CheckpointWriteError: the checkpoint before could not be written, or this one cannot.
        """
        self.wait()
        draft = checkpoint.begin(root, step, policy_writer)
        copies = {name: checkpoint.copied(group) for name, group in tensors.items()}
        self._thread = threading.Thread(
            target=self._finish, args=(draft, copies, dict(state), keep), name=f"checkpoint {step}", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointWriteError: what was written last could not be, and was removed; older ones are untouched.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def leave(self) -> None:
        """Returns when nothing is being written; whoever lost interest in it does not hear of errors."""
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001 - whatever the thread raised
            _LOG.warning("a checkpoint that nobody waits for any more was not written: %s", error)

    def _finish(
        self, draft: Draft, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, object], keep: int
    ) -> None:
        try:
            checkpoint.finish(draft, tensors, state, keep)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread, by `wait`
            self._error = error
