"""Writes checkpoints (checkpoint.py), behind training's back where a CheckpointWriter does.

    caller   save(...)     waits for the checkpoint before; has the policy write its own files, which the system takes
                           at memory speed; copies all other tensors; returns
    thread                 writes the copies, waits for the disk, hashes, seals, renames, drops old checkpoints
    caller   wait()        before the checkpoint is read, and at the end; raises what failed

A process that is asked to exit meanwhile exits when the thread is done, so what was to be saved is saved.  Until then
it holds a copy of the optimizer's state, and of what else a checkpoint has in addition to the policy, on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf_embodied.errors import CheckpointWriteError
from rlinf_embodied.learning.checkpoint import (
    COMPLETE,
    FORMAT,
    MANIFEST,
    STATE,
    TENSORS,
    complete,
    file_sha256,
    take_back,
)

_LOG = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint at a time; belongs to the one worker that writes a run's checkpoints."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None

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
        """Begins <root>/step_<step>, which replaces one of that name, and returns; arguments may change from then on.

        Once written, `latest` points at it and all but the `keep` newest, by the time of writing, are dropped.

        Args:
            root: folder of all checkpoints of a run.
            step: number of finished iterations.
            policy_writer: writes the policy's files into the folder that it is given.
            tensors: groups of named tensors, for example {"policy_optimizer": {"mean": ...}}.
            state: plain values that JSON can hold.
            keep: how many checkpoints stay, at least one.

        Raises:
            CheckpointWriteError: the checkpoint before could not be written, or this one cannot.
        """
        self.wait()
        target = step_folder(root, step)
        _begin(target, policy_writer)
        copies = {name: copied(group) for name, group in tensors.items()}
        self._pending = self._threads.submit(_finish, target, step, copies, dict(state), keep)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointWriteError: what was written last could not be, and was removed; older ones are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def leave(self) -> None:
        """Returns when nothing is being written; an error is logged, as nobody waits for the checkpoint any more."""
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001 - whatever the thread raised
            _LOG.warning("a checkpoint that nobody waits for any more was not written: %s", error)


def step_folder(root: Path, step: int) -> Path:
    """Returns where the checkpoint of a step lies below a folder of checkpoints."""
    return root / f"step_{step:06d}"


def _begin(target: Path, policy_writer: Callable[[Path], None]) -> None:
    """Clears what a killed writer left, and writes the policy's own files aside."""
    root, partial = target.parent, _partial(target)
    with _all_or_nothing(target):
        is_new = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        if is_new:
            _sync(root.parent)
        _tidy(root)
        partial.mkdir()
        policy_writer(partial)


def _finish(
    target: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, object], keep: int
) -> None:
    """Adds tensors (on the CPU) and state, seals and renames."""
    partial = _partial(target)
    with _all_or_nothing(target):
        _write_state(partial, tensors, state)
        _open_to_all(partial)
        newest = max((manifest.sequence for _, manifest in complete(target.parent)), default=0)
        _seal(partial, step, newest + 1)
        _install(partial, target)
    _point_to(target, keep)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _point_to(target: Path, keep: int) -> None:
    """Points `latest` at a checkpoint that is complete; drops old ones."""
    try:  # it is there under its name, and `find_latest` does without the link
        _sync(target.parent)
        shutil.rmtree(_aside(target), ignore_errors=True)
        point_latest(target)
        _prune(target.parent, keep)
    except OSError as error:
        _LOG.warning("checkpoint %s is written, but latest or old checkpoints are not up to date: %s", target, error)


@contextlib.contextmanager
def _all_or_nothing(target: Path) -> Iterator[None]:
    """Removes what was written of a checkpoint when the block fails."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(_partial(target), ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise CheckpointWriteError(
            f"checkpoint {target} could not be written ({error}) and was removed; older ones are untouched: free "
            "space on the disk or use another run.dir, then resume"
        ) from error


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies in the CPU's memory, which no later training step changes."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def write_whole(folder: Path, write: Callable[[Path], object], marker: str) -> None:
    """Has `write` fill a folder aside and renames it, so that others see all of it or nothing.

    A folder of that name that holds the file `marker` stays: another process made the same meanwhile, and may read it.
    """
    partial = folder.with_name(folder.name + f".partial-{os.getpid()}")
    try:
        write(partial)
        _open_to_all(partial)
        for path in (*partial.rglob("*"), partial):  # a name must not reach the disk before what it stands for
            _sync(path)
        if not (folder / marker).exists():
            shutil.rmtree(folder, ignore_errors=True)
            with _unless_made(folder / marker):
                partial.rename(folder)
            _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _unless_made(file: Path) -> Iterator[None]:
    """Passes over a folder that cannot be renamed, where another process was faster by a moment."""
    try:
        yield
    except OSError:
        if not file.exists():
            raise


def _open_to_all(folder: Path) -> None:
    """Gives files and folders the modes that the umask allows: safetensors writes for its owner alone."""
    probe = folder / ".mode"
    probe.mkdir()
    allowed = stat.S_IMODE(probe.stat().st_mode)
    probe.rmdir()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_nlink > 1:  # a link to a file that is another's, too
            continue
        path.chmod(allowed if path.is_dir() else allowed & 0o666)


def _write_state(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, object]) -> None:
    (folder / TENSORS).mkdir()
    for name, group in tensors.items():
        save_file(dict(group), folder / TENSORS / f"{name}.safetensors")
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _seal(folder: Path, step: int, sequence: int) -> None:
    """Writes manifest and marker once everything else has reached the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        _sync(path)
    content = {"format": FORMAT, "step": step, "sequence": sequence, "files": files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(manifest)
    (folder / COMPLETE).write_text(file_sha256(manifest) + "\n", encoding="utf-8")
    _sync(folder / COMPLETE)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _sync(path)


def _install(partial: Path, target: Path) -> None:
    """Renames; a folder cannot be replaced in one step, so an old one of that name waits aside (see `_tidy`)."""
    if target.exists():
        target.rename(_aside(target))
    partial.rename(target)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def point_latest(target: Path) -> None:
    """Points `latest`, in a checkpoint's parent folder, to the checkpoint.

    Raises:
        OSError: the folder cannot be written.
    """
    link = target.with_name("latest")
    fresh = target.with_name(".latest.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name, target_is_directory=True)
    os.replace(fresh, link)
    _sync(target.parent)


def _prune(root: Path, keep: int) -> None:
    for path, _ in complete(root)[:-keep]:
        dropped = path.with_name(f".{path.name}.dropped")
        path.rename(dropped)
        shutil.rmtree(dropped)


def _tidy(root: Path) -> None:
    """Undoes what a killed writer left."""
    take_back(root)
    for pattern in (".step_*.partial", ".step_*.replaced", ".step_*.dropped"):
        for path in root.glob(pattern):
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Waits until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
