"""Where demonstrations come from: files, or the scripted expert; checked before the run starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from rlinf_embodied.config import EnvConfig, Source, TrainConfig
from rlinf_embodied.data.lerobot import ACTION, IMAGES, STATE, LeRobotDataset
from rlinf_embodied.data.maniskill_h5 import Recording, read_recording
from rlinf_embodied.errors import ConfigError, DataError
from rlinf_embodied.plug_ins import env_options

NUM_DATA_BLOCKS = 4  # of demonstrations: fixed, so that weights are the same under every plan
_DATA, _FILES = "data", "warm_start.demonstrations"


class Kind(StrEnum):
    """What shows how."""

    expert = "expert"  # the scripted expert of the task
    maniskill = "maniskill"  # a recorded trajectory file
    lerobot = "lerobot"  # a LeRobot v3 folder


@dataclass(frozen=True, slots=True)
class DemonstrationSource:
    """A source of demonstrations, as plain values."""

    kind: Kind
    num_episodes: int
    path: str = ""
    digest: str = ""  # SHA-256 of what the files hold
    named: str = ""  # the config path that gave it, for errors

    @property
    def where(self) -> str:
        """The beginning of an error."""
        return f"{self.named} is {self.path!r}"


def sources_of(config: TrainConfig) -> tuple[DemonstrationSource, ...]:
    """Returns where the demonstrations of fine-tuning, or of a warm start, come from.

    Raises:
        ConfigError: files are missing, or of another task, control mode, camera or image size.
        DataError: files cannot be read, or hold too few episodes.
    """
    start, env = config.warm_start, config.env
    files = [] if start.demonstrations is None else [start.demonstrations]
    named, given = _FILES, start.demonstrations
    if config.algorithm.learns_from is Source.demonstrations and config.files:
        named, given, files = _DATA, config.data, config.files
    if files:
        found = tuple(_file(place, env, named) for place in files)
        if (number := sum(source.num_episodes for source in found)) < NUM_DATA_BLOCKS:
            raise DataError(
                f"{named} is {given!r}, which holds {number} episodes, but each of the {NUM_DATA_BLOCKS} blocks of "
                "demonstrations needs at least one: record more"
            )
        return found
    return (DemonstrationSource(Kind.expert, start.num_demos),)


# ---------------------------------------------------------------------------------------------------------------- files
def is_recording(path: Path) -> bool:
    """Whether a path names a trajectory file of ManiSkill, and not a dataset folder."""
    return path.suffix in (".h5", ".hdf5")


def _file(place: str, env: EnvConfig, named: str) -> DemonstrationSource:
    """Returns a trajectory file or a dataset folder, after all checks that need no simulator."""
    path, kinds = Path(place), "a trajectory file of ManiSkill (.h5) or the folder of a LeRobot v3 dataset"
    if not path.exists():
        raise ConfigError(f"{named} is {place!r}, but there is nothing: give {kinds}")
    whole = path.absolute()  # a link has the name that tells what it is, its target may not
    if is_recording(path):
        number = _require_recording(path, env, named)
        digest = _digest([path, path.with_suffix(".json")])
        return DemonstrationSource(Kind.maniskill, number, str(whole), digest, named)
    if path.is_file():
        raise DataError(f"{named} is {place!r}, but a file is known by its ending .h5: give {kinds}")
    number = _require_dataset(path, env, named)
    files = [file for file in sorted(whole.rglob("*")) if file.is_file()]
    return DemonstrationSource(Kind.lerobot, number, str(whole), _digest(files, whole), named)


def _digest(files: list[Path], below: Path | None = None) -> str:
    """Hashes contents, and the names below a folder."""
    found = hashlib.sha256()
    for path in files:
        if below is not None:
            found.update(f"{path.relative_to(below)}\n".encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _require_recording(path: Path, env: EnvConfig, named: str) -> int:
    recording, where = read_recording(path, named), f"{named} is {str(path)!r}"
    _require_same_env(recording, env, where)
    for episode in recording.episodes:
        require_actions(where, episode.name, episode.actions)
    sizes = sorted({episode.actions.shape[1] for episode in recording.episodes})
    if len(sizes) > 1:
        raise DataError(f"{where}, but its actions have {sizes} dimensions: split the file")
    longest = max(len(episode.actions) for episode in recording.episodes)
    if longest > env.horizon:
        raise ConfigError(
            f"env.horizon is {env.horizon}, but {named}={path} has episodes of up to {longest} env steps, whose ends "
            f"would be missing: set env.horizon={longest}"
        )
    return len(recording.episodes)


def _setting(env: EnvConfig, name: str) -> object:
    """Returns a setting of an env; None for an option that the env does not have."""
    owner = env_options(env) if name.startswith("options.") else env
    return getattr(owner, name.removeprefix("options."), None)


def _require_same_env(recording: Recording, env: EnvConfig, where: str) -> None:
    others = {
        "task": "give a recording of that task",
        "options.control_mode": "convert the recording: python -m mani_skill.trajectory.replay_trajectory "
        "-c <control mode> --save-traj",
    }
    for name, other in others.items():
        ours, theirs = _setting(env, name), getattr(recording, name.removeprefix("options."))
        if ours not in (theirs, None):
            raise ConfigError(
                f"{where}, recorded with {theirs!r}, but env.{name} is {ours!r}: set env.{name}={theirs}, or {other}"
            )


def _require_dataset(path: Path, env: EnvConfig, named: str) -> int:
    dataset, where = LeRobotDataset(path, named), f"{named} is {str(path)!r}"
    for name in (ACTION, STATE):
        if dataset.size(name) is None:
            raise DataError(f"{where}, but it has no vectors called {name!r}: it has {', '.join(dataset.features)}")
    if not env.cameras:
        raise ConfigError(f"env.cameras is [], but {named}={path} shows images: name the cameras, {dataset.cameras}")
    missing = [name for name in env.cameras if name not in dataset.cameras]
    if missing:
        raise ConfigError(
            f"env.cameras is {env.cameras}, but the dataset of {named}={path} has images of "
            f"{', '.join(dataset.cameras) or 'no camera'}: name cameras that it has, or rename its features to "
            f"{', '.join(IMAGES + name for name in missing)}"
        )
    for name in env.cameras:
        height, width = dataset.image_size(name)
        if (height, width) != (env.obs_size, env.obs_size):
            raise ConfigError(
                f"env.obs_size is {env.obs_size}, but {IMAGES + name} of {named}={path} is {width} x {height}: "
                + (f"set env.obs_size={width}" if width == height else "give a dataset with square images")
            )
    return len(dataset)


def require_actions(where: str, episode: str, actions: np.ndarray) -> None:
    """Checks that the actions [T, A] of an episode are what a policy can choose."""
    wrong = ~(np.isfinite(actions) & (np.abs(actions) <= 1 + 1e-5))
    if wrong.any():
        step, dimension = (int(k) for k in np.argwhere(wrong)[0])
        raise DataError(
            f"{where}, but action {dimension} of step {step} of {episode} is {actions[step, dimension]}, and those of "
            "a policy lie in [-1, 1]: leave the episode out, or record with a control mode whose actions are normalised"
        )
