"""Trajectory files of ManiSkill's RecordEpisode: actions and reset seeds in `<name>.h5` and `<name>.json`.

<name>.json   env_info {env_id, env_kwargs {control_mode, robot_uids, ...}}, episodes [{episode_id, episode_seed, ...}]
<name>.h5     traj_<episode_id>/actions float32 [T, A]

Actions and seeds suffice to replay an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_embodied.errors import DataError


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode as its seed and actions."""

    name: str  # "traj_0"
    seed: int
    actions: np.ndarray  # float32 [T, A]


@dataclass(frozen=True, slots=True)
class Recording:
    """The env and the episodes of a trajectory file, in the file's order."""

    task: str
    control_mode: str
    episodes: tuple[RecordedEpisode, ...]


def read_recording(path: Path, named: str) -> Recording:
    """Returns the recording in a trajectory file (.h5, its .json in the same folder); `named` is its config path.

    Raises:
        DataError: a file is missing or damaged, holds no episode, or one of them has no seed or unusable actions.
    """
    import h5py  # few runs need it

    where, description_path = f"{named} is {str(path)!r}", path.with_suffix(".json")
    try:
        description = json.loads(description_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{where}, but {description_path} cannot be read ({error}): ManiSkill writes it next to the .h5 file, "
            "with the seeds of the episodes; copy it there"
        ) from error
    try:
        info, entries = description["env_info"], description["episodes"]
        task, kwargs = str(info["env_id"]), info.get("env_kwargs") or {}
        modes = {str(entry.get("control_mode") or kwargs["control_mode"]) for entry in entries}
        with h5py.File(path, "r") as file:
            episodes = tuple(_episode(file, entry, where) for entry in entries)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise DataError(
            f"{where}, but it is no trajectory file of ManiSkill's RecordEpisode ({error}): give a file that was "
            "recorded with save_trajectory=True, with its .json in the same folder"
        ) from error
    if len(modes) != 1:
        problem = f"has several control modes ({', '.join(sorted(modes))}): split it" if modes else "holds no episode"
        raise DataError(f"{where}, but it {problem}, or give another file")
    return Recording(task, modes.pop(), episodes)


def _episode(file: Mapping[str, Any], entry: Mapping[str, Any], where: str) -> RecordedEpisode:
    name = f"traj_{int(entry['episode_id'])}"
    seed = entry.get("episode_seed", (entry.get("reset_kwargs") or {}).get("seed"))
    if isinstance(seed, list) and len(seed) == 1:
        (seed,) = seed
    if not isinstance(seed, int):
        raise DataError(f"{where}, but {name} has the seed {seed!r}: record episodes with reset(seed=<number>)")
    actions = np.asarray(file[name]["actions"])
    if actions.ndim != 2 or len(actions) == 0 or not np.issubdtype(actions.dtype, np.number):
        raise DataError(
            f"{where}, but the actions of {name} are {actions.dtype} {list(actions.shape)}, and float32 [T, A] with T "
            "of at least 1 are needed: record the episode anew, or leave it out"
        )
    return RecordedEpisode(name, seed, actions.astype(np.float32))
