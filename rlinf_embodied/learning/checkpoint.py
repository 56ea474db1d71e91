"""Checkpoints that are whole or not there: written aside, sealed with checksums, renamed, then pointed at.

    <root>/step_000010/  config.json model.safetensors ...     the policy's own files: the folder loads like a policy
                         state.json                            counters and other plain values
                         training_state/<name>.safetensors     optimizer moments, carry-over
                         manifest.json  COMPLETE               SHA-256 of every file; SHA-256 of the manifest
           latest -> step_000010

This module finds, checks and reads them; checkpoint_writer.py writes them.  A write that fails (a full disk, a killed
process) leaves older checkpoints and `latest` as they were.  One process writes below a root; any number may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlinf_embodied.errors import CheckpointError

FORMAT = "rlinf_embodied checkpoint 1"
STATE, MANIFEST, COMPLETE, TENSORS = "state.json", "manifest.json", "COMPLETE", "training_state"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says."""

    step: int
    sequence: int  # counts the checkpoints written below a root
    files: dict[str, dict[str, object]]  # relative path -> {"bytes", "sha256"}


def find_latest(root: Path) -> Path | None:
    """Returns the checkpoint below `root` that was written last and is complete; None otherwise."""
    with contextlib.suppress(OSError):  # a reader may lack the right to write
        take_back(root)
    found = complete(root)
    return found[-1][0] if found else None


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that can be used, and what is wrong with those behind it."""

    path: Path | None
    unusable: tuple[str, ...]  # for example ("step_000004 is incomplete (no manifest.json)",)


def newest_undamaged(root: Path) -> Newest:
    """Returns the checkpoint below `root` that was written last of those of which every byte is as it was written."""
    with contextlib.suppress(OSError):  # a reader may lack the right to write
        take_back(root)
    unusable, chosen = {}, None
    for path, manifest in reversed(complete(root)):
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
    if STATE not in manifest.files:
        raise CheckpointError(f"checkpoint {path} is damaged ({MANIFEST} has no {STATE}): {_instead(path)}")
    _verify_file(path, manifest, STATE)
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path} is damaged ({STATE} holds no JSON object): {_instead(path)}")
    return state


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
        raise CheckpointError(f"checkpoint {path} is damaged ({relative}: {error}): {_instead(path)}") from error


def complete(root: Path) -> list[tuple[Path, Manifest]]:
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
        data = (path / MANIFEST).read_bytes()
        seal = (path / COMPLETE).read_text(encoding="utf-8").strip()
    except OSError as error:
        name = Path(str(error.filename)).name
        ours = (path / MANIFEST).exists() or (path / STATE).exists()
        missing = f"no {name}" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        return f"{'is incomplete' if ours else 'is not a training checkpoint of this project'} ({missing})"
    if hashlib.sha256(data).hexdigest() != seal:
        return f"is damaged ({MANIFEST} was changed)"
    return _parsed(data)


def _parsed(data: bytes) -> Manifest | str:
    """Returns what the bytes of a manifest say, or what is wrong with them."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return f"is damaged ({MANIFEST} holds no JSON object)"
    if content.get("format") != FORMAT:
        return f"has the format {content.get('format')!r}, but {FORMAT!r} is needed (that of the version that wrote it)"
    step, sequence, files = (content.get(name) for name in ("step", "sequence", "files"))
    if not (_is_count(step) and _is_count(sequence) and isinstance(files, dict)):
        return f"is damaged ({MANIFEST} has not its step, sequence and files)"
    for name, entry in files.items():
        if not _stays_inside(name):
            return f"is damaged ({MANIFEST} names {name!r}, which leads out of the checkpoint)"
        if not (isinstance(entry, dict) and _is_count(entry.get("bytes")) and isinstance(entry.get("sha256"), str)):
            return f"is damaged ({MANIFEST} has not the size and checksum of {name})"
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
    if file.stat().st_size != expected["bytes"] or file_sha256(file) != expected["sha256"]:
        return f"is damaged (the checksum of {name} differs)"
    return ""


def _instead(path: Path) -> str:
    """Returns the next action: which other checkpoints there are."""
    place = path.resolve()
    others = sorted(
        (p.name for p in place.parent.glob("step_*") if p != place and (p / COMPLETE).exists()), reverse=True
    )
    if others:
        return f"use {' or '.join(others)} in {place.parent}"
    return "give a folder such as <run.dir>/checkpoints/latest"


def take_back(root: Path) -> None:
    """Gives checkpoints their name back whose writer was killed between the two renames of a replacement."""
    for aside in root.glob(".step_*.replaced"):
        original = root / aside.name.removeprefix(".").removesuffix(".replaced")
        if not original.exists():
            aside.rename(original)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------ identity
def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
