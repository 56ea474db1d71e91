"""Checkpoints that are whole or not there: written aside, sealed with checksums, renamed, then pointed at.

    <root>/step_000010/  config.json model.safetensors ...     the policy's own files: the folder loads like a policy
                         state.json                            counters and other plain values
                         training_state/<name>.safetensors     optimizer moments, carry-over
                         manifest.json  COMPLETE               SHA-256 of every file; SHA-256 of the manifest
           latest -> step_000010

What fails on the way (a full disk, a killed process) leaves older checkpoints and `latest` as they were.  One process
writes below a root at a time; any number may read.  `save` is `begin` and `finish` in one; checkpoint_writer.py runs
the second half beside training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_embodied.errors import CheckpointError, CheckpointWriteError

_LOG = logging.getLogger(__name__)
_FORMAT = "rlinf_embodied checkpoint 1"
_STATE, _MANIFEST, _COMPLETE, _TENSORS = "state.json", "manifest.json", "COMPLETE", "training_state"


# ------------------------------------------------------------------------------------------------------------- writing
def step_folder(root: Path, step: int) -> Path:
    """Returns where the checkpoint of a step lies below a folder of checkpoints."""
    return root / f"step_{step:06d}"


def save(
    root: Path,
    step: int,
    *,
    policy_writer: Callable[[Path], None],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, object],
    keep: int = 3,
) -> Path:
    """Writes <root>/step_<step>, points `latest` at it, drops all but the `keep` newest, and returns its path.

    A checkpoint of the same step is replaced; newest is what was written last, whatever its step.

    Args:
        root: folder of all checkpoints of a run.
        step: number of finished iterations.
        policy_writer: writes the policy's files into the folder that it is given.
        tensors: groups of named tensors, for example {"policy_optimizer": {"mean": ...}}.
        state: plain values that JSON can hold.
        keep: how many checkpoints stay, at least one.

    Raises:
        CheckpointWriteError: it could not be, and was removed again; older ones are untouched.
    """
    draft = begin(root, step, policy_writer)
    return finish(draft, {name: copied(group) for name, group in tensors.items()}, state, keep)


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written: what is there of it is nobody's until it is sealed and renamed."""

    target: Path
    partial: Path
    step: int


def begin(root: Path, step: int, policy_writer: Callable[[Path], None]) -> Draft:
    """Clears what a killed writer left, and writes the policy's own files; the first half of `save`.

    Raises:
        CheckpointWriteError: they could not be written.
    """
    target = step_folder(root, step)
    draft = Draft(target, root / f".{target.name}.partial", step)
    with _all_or_nothing(draft):
        is_new = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        if is_new:
            _sync(root.parent)
        _tidy(root)
        draft.partial.mkdir()
        policy_writer(draft.partial)
    return draft


def finish(
    draft: Draft, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, object], keep: int = 3
) -> Path:
    """Adds tensors (on the CPU, see `copied`) and state, seals and installs; the second half of `save`.

    Raises:
        CheckpointWriteError: it could not be, and was removed again; older ones are untouched.
    """
    target = draft.target
    with _all_or_nothing(draft):
        _write_state(draft.partial, tensors, state)
        _open_to_all(draft.partial)
        newest = max((manifest.sequence for _, manifest in _complete(target.parent)), default=0)
        _seal(draft.partial, draft.step, newest + 1)
        _install(draft.partial, target)
    arrived(target, keep)
    return target


def arrived(target: Path, keep: int) -> None:
    """Points `latest` at a checkpoint that is complete, written here or brought from another node; drops old ones."""
    try:  # it is there under its name, and `find_latest` does without the link
        _sync(target.parent)
        shutil.rmtree(_aside(target), ignore_errors=True)
        point_latest(target)
        _prune(target.parent, keep)
    except OSError as error:
        _LOG.warning("checkpoint %s is written, but latest or old checkpoints are not up to date: %s", target, error)


@contextlib.contextmanager
def _all_or_nothing(draft: Draft) -> Iterator[None]:
    """Removes what there is of a checkpoint when it fails within."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft.partial, ignore_errors=True)
        raise CheckpointWriteError(
            f"checkpoint {draft.target} could not be written ({error}) and was removed; older ones are untouched: free "
            "space on the disk or use another run.dir, then resume"
        ) from error
    except BaseException:
        shutil.rmtree(draft.partial, ignore_errors=True)
        raise


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
    (folder / _TENSORS).mkdir()
    for name, group in tensors.items():
        save_file(dict(group), folder / _TENSORS / f"{name}.safetensors")
    (folder / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _seal(folder: Path, step: int, sequence: int) -> None:
    """Writes manifest and marker once everything else has reached the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    content = {"format": _FORMAT, "step": step, "sequence": sequence, "files": files}
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(manifest)
    (folder / _COMPLETE).write_text(_sha256(manifest) + "\n", encoding="utf-8")
    _sync(folder / _COMPLETE)
    for path in (*_folders(folder), folder):
        _sync(path)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_dir()]


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
    for path, _ in _complete(root)[:-keep]:
        dropped = path.with_name(f".{path.name}.dropped")
        path.rename(dropped)
        shutil.rmtree(dropped)


def _tidy(root: Path) -> None:
    """Undoes what a killed writer left."""
    _take_back(root)
    for pattern in (".step_*.partial", ".step_*.replaced", ".step_*.dropped"):
        for path in root.glob(pattern):
            shutil.rmtree(path)


def _take_back(root: Path) -> None:
    """Gives checkpoints their name back whose writer was killed between the two renames of a replacement."""
    for aside in root.glob(".step_*.replaced"):
        original = root / aside.name.removeprefix(".").removesuffix(".replaced")
        if not original.exists():
            aside.rename(original)


def _sync(path: Path) -> None:
    """Waits until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says."""

    step: int
    sequence: int  # counts the checkpoints written below a root
    files: dict[str, dict[str, object]]  # relative path -> {"bytes", "sha256"}


def find_latest(root: Path) -> Path | None:
    """Returns the checkpoint below `root` that was written last and is complete; None otherwise."""
    with contextlib.suppress(OSError):  # a reader may lack the right to write
        _take_back(root)
    found = _complete(root)
    return found[-1][0] if found else None


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that can be used, and what is wrong with those behind it."""

    path: Path | None
    unusable: tuple[str, ...]  # for example ("step_000004 is incomplete (no manifest.json)",)


def newest_undamaged(root: Path) -> Newest:
    """Returns the checkpoint below `root` that was written last of those of which every byte is as it was written."""
    with contextlib.suppress(OSError):  # a reader may lack the right to write
        _take_back(root)
    unusable, chosen = {}, None
    for path, manifest in reversed(_complete(root)):
        wrong = next(filter(None, (_damage(path, manifest, name) for name in manifest.files)), "")
        if not wrong:
            chosen = path
            break
        unusable[path.name] = wrong
    for path in root.glob("step_*"):
        found = _manifest_of(path)
        if isinstance(found, str) and (chosen is None or path.name > chosen.name):
            unusable[path.name] = found
    return Newest(chosen, tuple(f"{name} {wrong}" for name, wrong in sorted(unusable.items())))


def verify(path: Path) -> Manifest:
    """Checks that a checkpoint is ours, complete and undamaged, every byte of it.

    Raises:
        CheckpointError: it is not; says what is wrong and what to use instead.
    """
    manifest = _read_manifest(path)
    for name in manifest.files:
        _verify_file(path, manifest, name)
    return manifest


def load_state(path: Path) -> dict[str, object]:
    """Returns the plain values of a checkpoint after checking them; `verify` checks the rest.

    Raises:
        CheckpointError: the checkpoint is not complete, or these values are damaged.
    """
    manifest = _read_manifest(path)
    if _STATE not in manifest.files:
        raise CheckpointError(f"checkpoint {path} is damaged ({_MANIFEST} has no {_STATE}): {_instead(path)}")
    _verify_file(path, manifest, _STATE)
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path} is damaged ({_STATE} holds no JSON object): {_instead(path)}")
    return state


def load_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Returns a group of tensors of a checkpoint that was verified, on CPU; {} if it has no such group.

    Raises:
        CheckpointError: the checkpoint is not complete, or the file holds no tensors.
    """
    relative = f"{_TENSORS}/{name}.safetensors"
    if relative not in _read_manifest(path).files:
        return {}
    try:
        return load_file(path / relative)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged ({relative}: {error}): {_instead(path)}") from error


def _complete(root: Path) -> list[tuple[Path, Manifest]]:
    """Returns the complete checkpoints below a root, oldest first."""
    found = [(path, _manifest_of(path)) for path in root.glob("step_*")]
    return sorted(((p, m) for p, m in found if isinstance(m, Manifest)), key=lambda item: item[1].sequence)


def _read_manifest(path: Path) -> Manifest:
    found = _manifest_of(path)
    if isinstance(found, str):
        raise CheckpointError(f"checkpoint {path} {found}: {_instead(path)}")
    return found


def _manifest_of(path: Path) -> Manifest | str:
    """Returns what manifest.json says, or what is wrong with the checkpoint."""
    if not path.is_dir():
        return "does not exist or is no folder"
    try:
        data = (path / _MANIFEST).read_bytes()
        seal = (path / _COMPLETE).read_text(encoding="utf-8").strip()
    except OSError as error:
        name = Path(str(error.filename)).name
        ours = (path / _MANIFEST).exists() or (path / _STATE).exists()
        missing = f"no {name}" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        return f"{'is incomplete' if ours else 'is not a training checkpoint of this project'} ({missing})"
    if hashlib.sha256(data).hexdigest() != seal:
        return f"is damaged ({_MANIFEST} was changed)"
    return _parsed(data)


def _parsed(data: bytes) -> Manifest | str:
    """Returns what the bytes of a manifest say, or what is wrong with them."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return f"is damaged ({_MANIFEST} holds no JSON object)"
    if content.get("format") != _FORMAT:
        return (
            f"has the format {content.get('format')!r}, but {_FORMAT!r} is needed (that of the version that wrote it)"
        )
    step, sequence, files = (content.get(name) for name in ("step", "sequence", "files"))
    if not (_is_count(step) and _is_count(sequence) and isinstance(files, dict)):
        return f"is damaged ({_MANIFEST} has not its step, sequence and files)"
    for name, entry in files.items():
        if not _stays_inside(name):
            return f"is damaged ({_MANIFEST} names {name!r}, which leads out of the checkpoint)"
        if not (isinstance(entry, dict) and _is_count(entry.get("bytes")) and isinstance(entry.get("sha256"), str)):
            return f"is damaged ({_MANIFEST} has not the size and checksum of {name})"
    return Manifest(cast(int, step), cast(int, sequence), files)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _stays_inside(name: str) -> bool:
    """Whether a file's name, relative to its folder, is in its plain form and leads nowhere else."""
    path = PurePosixPath(name)
    return name == str(path) and not path.is_absolute() and not {"..", "."} & set(path.parts) and "\0" not in name


def _verify_file(path: Path, manifest: Manifest, name: str) -> None:
    wrong = _damage(path, manifest, name)
    if wrong:
        raise CheckpointError(f"checkpoint {path} {wrong}: {_instead(path)}")


def _damage(path: Path, manifest: Manifest, name: str) -> str:
    """Returns what is wrong with a file, "" if nothing is."""
    file, expected = path / name, manifest.files[name]
    if file.resolve() != path.resolve() / name:
        return f"is damaged ({name} is a link that leads elsewhere)"
    if not file.is_file():
        return f"is damaged ({name} is missing)"
    if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
        return f"is damaged (the checksum of {name} differs)"
    return ""


def _instead(path: Path) -> str:
    """Returns the next action: which other checkpoints there are."""
    place = path.resolve()
    others = sorted(
        (p.name for p in place.parent.glob("step_*") if p != place and (p / _COMPLETE).exists()), reverse=True
    )
    if others:
        return f"use {' or '.join(others)} in {place.parent}"
    return "give a folder such as <run.dir>/checkpoints/latest"


# ------------------------------------------------------------------------------------------------------------ identity
def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
