"""Where demonstrations come from, if not from the scripted expert: checked before anything starts, as plain values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from rlinf_embodied.config import EnvConfig, TrainConfig, WarmStartConfig
from rlinf_embodied.data.lerobot import ACTION, IMAGES, STATE, LeRobotDataset
from rlinf_embodied.data.maniskill_h5 import Recording, read_recording
from rlinf_embodied.embodied.policy_folder import require_policy_folder, trained_under
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError

FILES, TEACHER = "warm_start.demonstrations", "warm_start.teacher"
LEAST_EPISODES = 4  # one in each data block
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
    path = Path(config.demonstrations).absolute()  # a link has the name that tells what it is, its target may not
    if is_recording(path):
        number = len(read_recording(path, FILES).episodes)
        return Source(Kind.maniskill, str(path), _digest([path, path.with_suffix(".json")]), number)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return Source(Kind.lerobot, str(path), _digest(files, path), len(LeRobotDataset(path, FILES)))


def is_recording(path: Path) -> bool:
    """Whether a path names a trajectory file of ManiSkill, and not a dataset folder."""
    return path.suffix in (".h5", ".hdf5")


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
        _require_teacher(start.teacher, config.env)
    elif start.demonstrations is not None:
        path = Path(start.demonstrations)
        if not path.exists():
            raise ConfigError(
                f"{FILES} is {start.demonstrations!r}, but there is nothing: give a trajectory file of ManiSkill (.h5) "
                "or the folder of a LeRobot v3 dataset"
            )
        number = _require_recording(path, config.env) if is_recording(path) else _require_dataset(path, config.env)
        if number < LEAST_EPISODES:
            raise DataError(
                f"{FILES} is {start.demonstrations!r}, which holds {number} episodes, but each of the "
                f"{LEAST_EPISODES} blocks of demonstrations needs at least one: record more"
            )


def _require_recording(path: Path, env: EnvConfig) -> int:
    recording = read_recording(path, FILES)
    for name, theirs in (("task", recording.task), ("control_mode", recording.control_mode)):
        ours = getattr(env, name)
        if ours != theirs:
            raise ConfigError(
                f"{FILES} is {str(path)!r}, recorded with {name} {theirs!r}, but env.{name} is {ours!r}: set "
                f"env.{name}={theirs}, or {_other(name)}"
            )
    for episode in recording.episodes:
        require_actions(f"{FILES} is {str(path)!r}", episode.name, episode.actions)
    _require_one_size(path, recording)
    longest = max((len(episode.actions) for episode in recording.episodes), default=0)
    if longest > env.horizon:
        needed = -(-longest // env.chunk) * env.chunk
        raise ConfigError(
            f"env.horizon is {env.horizon}, but {FILES}={path} has episodes of up to {longest} env steps, whose ends "
            f"would be missing: set env.horizon={needed}"
        )
    return len(recording.episodes)


def _other(name: str) -> str:
    if name == "task":
        return "give a recording of that task"
    return "convert the recording: python -m mani_skill.trajectory.replay_trajectory -c <control mode> --save-traj"


def _require_one_size(path: Path, recording: Recording) -> None:
    sizes = sorted({episode.actions.shape[1] for episode in recording.episodes})
    if len(sizes) > 1:
        raise DataError(f"{FILES} is {str(path)!r}, but its actions have {sizes} dimensions: split the file")


def require_actions(where: str, episode: str, actions: np.ndarray) -> None:
    """Checks that the actions [T, A] of an episode are what a policy can say.

    Raises:
        DataError: they are not finite, or not in [-1, 1].
    """
    wrong = ~(np.isfinite(actions) & (np.abs(actions) <= 1 + 1e-5))
    if wrong.any():
        step, dimension = (int(k) for k in np.argwhere(wrong)[0])
        raise DataError(
            f"{where}, but action {dimension} of step {step} of {episode} is {actions[step, dimension]}, and those of "
            "a policy lie in [-1, 1]: leave the episode out, or record with a control mode whose actions are normalised"
        )


def _require_dataset(path: Path, env: EnvConfig) -> int:
    dataset = LeRobotDataset(path, FILES)
    info, where = dataset.info, f"{FILES} is {str(path)!r}"
    for name in (ACTION, STATE):
        if info.size(name) is None:
            raise DataError(f"{where}, but it has no vectors called {name!r}: it has {', '.join(info.features)}")
    missing = [name for name in env.cameras if name not in info.cameras]
    if missing:
        raise ConfigError(
            f"env.cameras is {env.cameras}, but the dataset of {FILES}={path} has images of "
            f"{', '.join(info.cameras) or 'no camera'}: name cameras that it has, or rename its features to "
            f"{', '.join(IMAGES + name for name in missing)}"
        )
    for name in env.cameras:
        height, width = info.image_size(name)
        if (height, width) != (env.obs_size, env.obs_size):
            raise ConfigError(
                f"env.obs_size is {env.obs_size}, but {IMAGES + name} of {FILES}={path} is {width} x {height}: "
                + (f"set env.obs_size={width}" if width == height else "give a dataset with square images")
            )
    if not env.cameras:
        raise ConfigError(f"env.cameras is [], but {FILES}={path} shows images: name the cameras, {info.cameras}")
    return len(dataset)


def _require_teacher(folder: str, env: EnvConfig) -> None:
    require_policy_folder(TEACHER, folder)
    missing = [name for name in _TEACHER_FILES if not (Path(folder) / name).exists()]
    if missing:
        raise CheckpointError(
            f"{TEACHER} is {folder!r}, but it lacks {', '.join(missing)}: give a whole checkpoint folder"
        )
    theirs = trained_under(folder).env
    if theirs.cameras:
        raise CheckpointError(
            f"{TEACHER} is {folder!r}, but that policy sees {', '.join(theirs.cameras)}, and a teacher acts on the "
            "simulator's state: train one with policy=state, or go on from that policy with warm_start.checkpoint"
        )
    for name in ("task", "control_mode", "robot"):
        if getattr(theirs, name) != getattr(env, name):
            raise CheckpointError(
                f"{TEACHER} is {folder!r}, trained with env.{name}={getattr(theirs, name)}, but env.{name} is "
                f"{getattr(env, name)}: use the same for both"
            )
