"""Where demonstrations come from, if not from the scripted expert, as plain values; file_checks.py checks files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlinf_embodied.config import EnvConfig, TrainConfig, WarmStartConfig
from rlinf_embodied.data.lerobot import LeRobotDataset
from rlinf_embodied.data.maniskill_h5 import read_recording
from rlinf_embodied.embodied.file_checks import is_recording, require_episodes, require_file
from rlinf_embodied.embodied.hierarchy import has_two_levels
from rlinf_embodied.embodied.policy_folder import require_policy_folder, trained_under
from rlinf_embodied.errors import CheckpointError

FILES, TEACHER = "warm_start.demonstrations", "warm_start.teacher"
_TEACHER_FILES = ("config.json", "model.safetensors", "dataset_statistics.json")


class Kind(StrEnum):
    """What a source is."""

    maniskill = "maniskill"  # a recorded trajectory file
    lerobot = "lerobot"  # a LeRobot v3 folder
    teacher = "teacher"  # a checkpoint of a policy on the simulator's state


@dataclass(frozen=True, slots=True)
class Source:
    """A source as its place and its content."""

    kind: Kind
    path: str
    digest: str  # SHA-256 of what the files hold
    num_episodes: int | None = None  # that it holds; None: as many as are asked for
    named: str = "warm_start.demonstrations"  # the config path that gave it, for errors


def source_of(config: WarmStartConfig) -> Source | None:
    """Returns where demonstrations come from, None for the scripted expert.

    Raises:
        DataError: files that cannot be read.
    """
    if config.teacher is not None:
        folder = Path(config.teacher).resolve()  # "latest" moves on
        return Source(Kind.teacher, str(folder), _digest([folder / name for name in _TEACHER_FILES]))
    if config.demonstrations is None:
        return None
    return file_source(config.demonstrations, FILES)


def file_source(place: str, named: str) -> Source:
    """Returns a trajectory file or a dataset folder as a source; `named` is the config path that gave it.

    Raises:
        DataError: files that cannot be read.
    """
    path = Path(place).absolute()  # a link has the name that tells what it is, its target may not
    if is_recording(path):
        number = len(read_recording(path, named).episodes)
        return Source(Kind.maniskill, str(path), _digest([path, path.with_suffix(".json")]), number, named)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return Source(Kind.lerobot, str(path), _digest(files, path), len(LeRobotDataset(path, named)), named)


def _digest(files: list[Path], below: Path | None = None) -> str:
    """Hashes contents, and the names below a folder."""
    found = hashlib.sha256()
    for path in files:
        if below is not None:
            found.update(f"{path.relative_to(below)}\n".encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


# --------------------------------------------------------------------------------------------------------------- checks
def require_source(config: TrainConfig) -> None:
    """Checks what is known without a simulator: that demonstrations, or a teacher, fit the env.

    Raises:
        ConfigError: they are of another task, control mode, camera or image size.
        DataError: the files cannot be used.
        CheckpointError: the teacher's folder cannot be used.
    """
    start = config.warm_start
    if start.teacher is not None:
        require_teacher(start.teacher, config.env, TEACHER)
    elif start.demonstrations is not None:
        require_episodes(require_file(start.demonstrations, config.env, FILES), start.demonstrations, FILES)


def require_teacher(folder: str, env: EnvConfig, named: str) -> None:
    """Checks that a folder holds a policy on the simulator's state for an env; `named` is the config path to name.

    Raises:
        CheckpointError: it does not.
    """
    require_policy_folder(named, folder)
    missing = [name for name in _TEACHER_FILES if not (Path(folder) / name).exists()]
    if missing:
        raise CheckpointError(
            f"{named} is {folder!r}, but it lacks {', '.join(missing)}: give a whole checkpoint folder"
        )
    if has_two_levels(folder):
        raise CheckpointError(
            f"{named} is {folder!r}, a checkpoint of two levels of policies, whose lower one does nothing of use where "
            "nobody tells it what: give a checkpoint of one policy"
        )
    theirs = trained_under(folder).env
    if theirs.cameras:
        raise CheckpointError(
            f"{named} is {folder!r}, but that policy sees {', '.join(theirs.cameras)}, and a teacher acts on the "
            "simulator's state: train one with policy=state, or go on from that policy with warm_start.checkpoint"
        )
    for name in ("task", "control_mode", "robot"):
        if getattr(theirs, name) != getattr(env, name):
            raise CheckpointError(
                f"{named} is {folder!r}, trained with env.{name}={getattr(theirs, name)}, but env.{name} is "
                f"{getattr(env, name)}: use the same for both"
            )
