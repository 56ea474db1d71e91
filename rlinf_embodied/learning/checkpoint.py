"""Atomic checkpoints: written to a temporary folder, sealed with checksums, renamed, then linked as `latest`.

    <root>/step_000010/  config.json model.safetensors ...     the policy's files: the folder loads as a policy
                         state.json                            counters and other plain values
                         training_state/<name>.safetensors     optimizer moments, carry-over
                         manifest.json                         written last: size and SHA-256 of every other file
           latest -> step_000010

A failed write (full disk, killed process) does not affect `latest` and the checkpoints of other steps.  Only one
process may write below a root; any number may read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_embodied.cache import open_to_all, sync
from rlinf_embodied.errors import CheckpointError, CheckpointWriteError
from rlinf_embodied.telemetry.progress import report_progress

FORMAT = "rlinf_embodied checkpoint 1"
STATE, MANIFEST, TENSORS = "state.json", "manifest.json", "training_state"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    sequence: int  # counts the checkpoints written below a root
    files: dict[str, tuple[int, str]]  # relative path -> bytes, SHA-256


def step_folder(root: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint below a root."""
    return root / f"step_{step:06d}"


def save(
    root: Path,
    step: int,
    *,
    policy_writer: Callable[[Path], None],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, object],
    keep: int = 3,
) -> None:
    """Writes <root>/step_<step>, replacing an existing one; returns after it is synced to disk.

    It contains the files that `policy_writer` writes to a given folder, groups of named `tensors`, such as
    {"policy_optimizer": {"mean": ...}}, and a `state` of plain values.  `latest` then points to it, and all but the
    last `keep` (at least one) checkpoints are removed.

    Raises:
        CheckpointWriteError: it cannot be written.
    """
    target = step_folder(root, step)
    partial = target.with_name(f".{target.name}.partial")
    try:
        root.mkdir(parents=True, exist_ok=True)
        sync(root.parent)
        for leftover in root.glob(".step_*"):  # of a killed writer
            shutil.rmtree(leftover)
        partial.mkdir()
        policy_writer(partial)
        (partial / TENSORS).mkdir()
        for name, group in tensors.items():
            held = {key: tensor.detach().cpu().contiguous() for key, tensor in group.items()}
            owners = Counter(tensor.untyped_storage().data_ptr() for tensor in held.values())
            for key, tensor in held.items():  # safetensors refuses tensors that share memory
                held[key] = tensor.clone() if owners[tensor.untyped_storage().data_ptr()] > 1 else tensor
            save_file(held, partial / TENSORS / f"{name}.safetensors")
        (partial / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        open_to_all(partial)
        _seal(partial, step, 1 + max((manifest.sequence for _, manifest in complete(root)), default=0))
        _install(partial, target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise CheckpointWriteError(
            f"checkpoint {target} could not be written ({error}) and was removed; older ones are untouched: free "
            "space on the disk or use another run.dir, then resume"
        ) from error
    try:  # the checkpoint is valid already, and `find_latest` does not need the link
        point_latest(target)
        for path, _ in complete(root)[:-keep]:
            removed = path.with_name(f".{path.name}.dropped")
            path.rename(removed)
            shutil.rmtree(removed)
    except OSError as error:
        _LOG.warning("checkpoint %s is written, but latest or old checkpoints are not up to date: %s", target, error)


def point_latest(target: Path) -> None:
    """Points `latest`, in a checkpoint's parent folder, to the checkpoint."""
    fresh = target.with_name(".latest.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name, target_is_directory=True)
    os.replace(fresh, target.with_name("latest"))
    sync(target.parent)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Makes `target` a hard link to a file, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _seal(folder: Path, step: int, sequence: int) -> None:
    """Writes the manifest once everything else has reached the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        sync(path)
        report_progress()
    content = {"format": FORMAT, "step": step, "sequence": sequence, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in (folder / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def _install(partial: Path, target: Path) -> None:
    replaced = target.with_name(f".{target.name}.replaced")  # from another run, or damaged
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def find_latest(root: Path) -> Path | None:
    """Returns the last written complete checkpoint below `root`; None if there is none."""
    return next((path for path, _ in reversed(complete(root))), None)


def verify(path: Path) -> Manifest:
    """Checks that a checkpoint is of this project, complete and undamaged, by the checksums of all files.

    Raises:
        CheckpointError: it is not; the message names the problem and other checkpoints.
    """
    manifest = _read_manifest(path)
    _require_whole(path, manifest, manifest.files)
    return manifest


def load_state(path: Path) -> dict[str, object]:
    """Returns the plain values of a checkpoint after checking them; `verify` checks the rest.

    Raises:
        CheckpointError: the checkpoint is not complete, or these values are damaged.
    """
    manifest = _read_manifest(path)
    if STATE not in manifest.files:
        raise _refusal(path, f"is damaged ({MANIFEST} has no {STATE})")
    _require_whole(path, manifest, [STATE])
    try:
        return dict(json.loads((path / STATE).read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise _refusal(path, f"is damaged ({STATE} holds no JSON object)") from error


def load_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Returns a group of tensors of a checkpoint that was verified, on CPU; {} if it has no such group.

    Raises:
        CheckpointError: the checkpoint is not complete, or the file holds no tensors.
    """
    relative = f"{TENSORS}/{name}.safetensors"
    if relative not in _read_manifest(path).files:
        return {}
    try:
        return load_file(path / relative)
    except (OSError, SafetensorError) as error:
        raise _refusal(path, f"is damaged ({relative}: {error})") from error


def complete(root: Path) -> list[tuple[Path, Manifest]]:
    """Returns the complete checkpoints below a root, oldest first."""
    checkpoints: list[tuple[Path, Manifest]] = []
    for path in root.glob("step_*"):
        with suppress(CheckpointError):
            checkpoints.append((path, _read_manifest(path)))
    return sorted(checkpoints, key=lambda item: item[1].sequence)


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise _refusal(path, "does not exist or is no folder")
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        format_ = content.get("format", "of no checkpoint")
        if format_ != FORMAT:
            raise _refusal(
                path, f"has the format {format_!r}, but {FORMAT!r} is needed (that of the version that wrote it)"
            )
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        manifest = Manifest(int(content["step"]), int(content["sequence"]), files)
    except OSError as error:
        kind = "is incomplete" if (path / STATE).exists() else "is not a training checkpoint of this project"
        raise _refusal(path, f"{kind} ({MANIFEST}: {error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _refusal(path, f"is damaged ({MANIFEST} is not as it was written: {error!r})") from error
    for name in files:
        # normalised, below the folder, and a valid file name
        parts = PurePosixPath(name).parts
        if name != "/".join(parts) or {"..", "/"} & set(parts) or not name or not name.isprintable():
            raise _refusal(path, f"is damaged ({MANIFEST} names {name!r}, which leads out of the checkpoint)")
    return manifest


def _require_whole(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Checks that files exist and match their checksums."""
    for name in names:
        file = path / name
        if file.resolve() != path.resolve() / name:
            raise _refusal(path, f"is damaged ({name} is a link that leads elsewhere)")
        if not file.is_file():
            raise _refusal(path, f"is damaged ({name} is missing)")
        if (file.stat().st_size, file_sha256(file)) != manifest.files[name]:
            raise _refusal(path, f"is damaged (the checksum of {name} differs)")


def _refusal(path: Path, problem: str) -> CheckpointError:
    """Returns an error with the problem and the next action, which lists other checkpoints."""
    resolved = path.resolve()
    available = [p.name for p in resolved.parent.glob("step_*") if p != resolved and (p / MANIFEST).exists()]
    others = f"use {' or '.join(sorted(available, reverse=True))} in {resolved.parent}"
    none = "give a folder such as <run.dir>/checkpoints/latest, or use another run.dir"
    return CheckpointError(f"checkpoint {path} {problem}: {others if available else none}")


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
