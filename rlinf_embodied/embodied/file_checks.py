"""Whether files of demonstrations can be learned from in an env: asked before anything expensive starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlinf_embodied.config import EnvConfig
from rlinf_embodied.data.lerobot import ACTION, IMAGES, STATE, LeRobotDataset
from rlinf_embodied.data.maniskill_h5 import Recording, read_recording
from rlinf_embodied.errors import ConfigError, DataError

LEAST_EPISODES = 4  # one in each data block


def is_recording(path: Path) -> bool:
    """Whether a path names a trajectory file of ManiSkill, and not a dataset folder."""
    return path.suffix in (".h5", ".hdf5")


def require_file(place: str, env: EnvConfig, named: str) -> int:
    """Checks a trajectory file or a dataset folder without a simulator; returns the number of its episodes.

    Args:
        place: its path.
        env: in which a policy is to do what it shows.
        named: the config path that gave it, for errors.

    Raises:
        ConfigError: there is nothing, or it is of another task, control mode, camera or image size.
        DataError: it cannot be read, or holds actions that a policy cannot say.
    """
    path, kinds = Path(place), "a trajectory file of ManiSkill (.h5) or the folder of a LeRobot v3 dataset"
    if not path.exists():
        raise ConfigError(f"{named} is {place!r}, but there is nothing: give {kinds}")
    if is_recording(path):
        return _require_recording(path, env, named)
    if path.is_file():
        raise DataError(f"{named} is {place!r}, but a file is known by its ending .h5: give {kinds}")
    inside = sorted(found.name for found in path.iterdir() if is_recording(found))
    if inside and not (path / "meta").exists():
        raise ConfigError(
            f"{named} is {place!r}, a folder with {', '.join(inside[:4])}: give the file, {path / inside[0]}"
        )
    return _require_dataset(path, env, named)


def require_episodes(number: int, place: str, named: str) -> None:
    """Checks that there are demonstrations for every data block.

    Raises:
        DataError: there are too few.
    """
    if number < LEAST_EPISODES:
        raise DataError(
            f"{named} is {place!r}, which holds {number} episodes, but each of the {LEAST_EPISODES} blocks of "
            "demonstrations needs at least one: record more"
        )


def _require_recording(path: Path, env: EnvConfig, named: str) -> int:
    recording = read_recording(path, named)
    for name, theirs in (("task", recording.task), ("control_mode", recording.control_mode)):
        ours = getattr(env, name)
        if ours != theirs:
            raise ConfigError(
                f"{named} is {str(path)!r}, recorded with {name} {theirs!r}, but env.{name} is {ours!r}: set "
                f"env.{name}={theirs}, or {_other(name)}"
            )
    for episode in recording.episodes:
        require_actions(f"{named} is {str(path)!r}", episode.name, episode.actions)
    _require_one_size(path, recording, named)
    longest = max((len(episode.actions) for episode in recording.episodes), default=0)
    if longest > env.horizon:
        raise ConfigError(
            f"env.horizon is {env.horizon}, but {named}={path} has episodes of up to {longest} env steps, whose ends "
            f"would be missing: set env.horizon={longest}"
        )
    return len(recording.episodes)


def _other(name: str) -> str:
    if name == "task":
        return "give a recording of that task"
    return "convert the recording: python -m mani_skill.trajectory.replay_trajectory -c <control mode> --save-traj"


def _require_one_size(path: Path, recording: Recording, named: str) -> None:
    sizes = sorted({episode.actions.shape[1] for episode in recording.episodes})
    if len(sizes) > 1:
        raise DataError(f"{named} is {str(path)!r}, but its actions have {sizes} dimensions: split the file")


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


def _require_dataset(path: Path, env: EnvConfig, named: str) -> int:
    dataset = LeRobotDataset(path, named)
    info, where = dataset.info, f"{named} is {str(path)!r}"
    for name in (ACTION, STATE):
        if info.size(name) is None:
            raise DataError(f"{where}, but it has no vectors called {name!r}: it has {', '.join(info.features)}")
    missing = [name for name in env.cameras if name not in info.cameras]
    if missing:
        raise ConfigError(
            f"env.cameras is {env.cameras}, but the dataset of {named}={path} has images of "
            f"{', '.join(info.cameras) or 'no camera'}: name cameras that it has, or rename its features to "
            f"{', '.join(IMAGES + name for name in missing)}"
        )
    for name in env.cameras:
        height, width = info.image_size(name)
        if (height, width) != (env.obs_size, env.obs_size):
            raise ConfigError(
                f"env.obs_size is {env.obs_size}, but {IMAGES + name} of {named}={path} is {width} x {height}: "
                + (f"set env.obs_size={width}" if width == height else "give a dataset with square images")
            )
    if not env.cameras:
        raise ConfigError(f"env.cameras is [], but {named}={path} shows images: name the cameras, {info.cameras}")
    _require_vectors(dataset, where)
    return len(dataset)


def _require_vectors(dataset: LeRobotDataset, where: str) -> None:
    """Checks all actions and states, which are read without the images, and that every file is there."""
    dataset.require_videos()
    for number, actions, state in dataset.vectors():
        require_actions(where, f"episode {number}", actions)
        require_finite(where, number, state)


def require_finite(where: str, number: int, state: np.ndarray) -> None:
    """Checks what the robot felt in an episode, [T, P].

    Raises:
        DataError: it is not finite.
    """
    if not np.isfinite(state).all():
        raise DataError(f"{where}, but {STATE} of episode {number} is not finite: leave it out")
