"""Trajectory files of ManiSkill's RecordEpisode: actions and reset seeds in `<name>.h5` and `<name>.json`.

<name>.json   env_info {env_id, env_kwargs {control_mode, robot_uids, ...}}, episodes [{episode_id, episode_seed, ...}]
<name>.h5     traj_<episode_id>/actions float32 [T, A]
                               /success, terminated, truncated bool [T]
                               /env_states/actors/<name>, articulations/<name> float32 [T + 1, D]
                               /obs                                             an empty group: observation mode "none"

Actions and seeds are all that is needed to run an episode again; the rest is written, where it is known, for
ManiSkill's own tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from rlinf_embodied.errors import DataError

if TYPE_CHECKING:
    import h5py  # imported where it is used: few runs need it


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """One episode as its cause."""

    name: str  # "traj_0"
    seed: int
    actions: np.ndarray  # float32 [T, A]
    success: np.ndarray | None = None  # bool [T], after each action; None: solved by the last one
    states: Mapping[str, np.ndarray] = field(default_factory=dict)  # by path below env_states, float32 [T + 1, D]

    @property
    def solved(self) -> np.ndarray:
        """After which actions the task is solved, bool [T]."""
        return np.arange(len(self.actions)) == len(self.actions) - 1 if self.success is None else self.success


@dataclass(frozen=True, slots=True)
class Recording:
    """What a trajectory file says of its env, and its episodes in the order of the file."""

    task: str
    control_mode: str
    robot: str | None  # None: the task's default
    episodes: tuple[RecordedEpisode, ...]
    horizon: int | None = None  # after which episodes are cut off
    source: tuple[str, str] = ("", "")  # what acted, in ManiSkill's short form ("rl"), and in words


def read_recording(path: Path, named: str) -> Recording:
    """Returns the recording in a trajectory file.

    Args:
        path: the .h5 file; its .json is in the same folder.
        named: the config path that gave it, for errors.

    Raises:
        DataError: a file is missing or damaged, holds no episode, or one of them has no seed or unusable actions.
    """
    where = f"{named} is {str(path)!r}"
    import h5py

    described = _read_description(path.with_suffix(".json"), where)
    try:
        info = described["env_info"]
        entries = described["episodes"]
        task, kwargs = str(info["env_id"]), info.get("env_kwargs") or {}
        modes = {str(entry.get("control_mode") or kwargs["control_mode"]) for entry in entries}
        with h5py.File(path, "r") as file:
            episodes = tuple(_episode(file, entry, where) for entry in entries)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise DataError(
            f"{where}, but it is no trajectory file of ManiSkill's RecordEpisode ({error}): give a file that was "
            "recorded with save_trajectory=True, whose .json lies beside it"
        ) from error
    if not episodes:
        raise DataError(f"{where}, but it holds no episode: record some, or give another file")
    if len(modes) != 1:
        raise DataError(f"{where}, but its episodes have several control modes ({', '.join(sorted(modes))}): split it")
    robot = kwargs.get("robot_uids")
    return Recording(task, modes.pop(), robot if isinstance(robot, str) else None, episodes)


def _read_description(path: Path, where: str) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{where}, but {path} cannot be read ({error}): ManiSkill writes it beside the .h5 file, and the seeds of "
            "the episodes stand in it; copy it there"
        ) from error
    return cast(dict, value)


def _episode(file: h5py.File, entry: Mapping, where: str) -> RecordedEpisode:
    name = f"traj_{int(entry['episode_id'])}"
    seed = entry.get("episode_seed", (entry.get("reset_kwargs") or {}).get("seed"))
    if isinstance(seed, list) and len(seed) == 1:
        (seed,) = seed
    if not isinstance(seed, int):
        raise DataError(f"{where}, but {name} has the seed {seed!r}: record episodes with reset(seed=<number>)")
    group = cast("h5py.Group", file[name])
    actions = np.asarray(group["actions"])
    if actions.ndim != 2 or len(actions) == 0 or not np.issubdtype(actions.dtype, np.number):
        raise DataError(
            f"{where}, but the actions of {name} are {actions.dtype} {list(actions.shape)}, and float32 [T, A] with T "
            "of at least 1 are needed: record the episode anew, or leave it out"
        )
    return RecordedEpisode(name, seed, actions.astype(np.float32))


def write_recording(path: Path, recording: Recording) -> None:
    """Writes <name>.h5 and <name>.json: what `read_recording`, and ManiSkill's replay_trajectory, need.

    Episodes are numbered in their order.
    """
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for k, episode in enumerate(recording.episodes):
            _write_episode(file.create_group(f"traj_{k}", track_order=True), episode, recording.horizon)
    content = {"env_info": _env_info(recording), "commit_info": None}
    content |= dict(zip(("source_type", "source_desc"), recording.source, strict=True)) if any(recording.source) else {}
    content["episodes"] = [_described(k, episode, recording) for k, episode in enumerate(recording.episodes)]
    path.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")


def _write_episode(group: h5py.Group, episode: RecordedEpisode, horizon: int | None) -> None:
    solved = episode.solved
    cut = np.zeros_like(solved)
    cut[-1] = len(episode.actions) == horizon and not solved[-1]
    group.create_group("obs")
    group.create_dataset("actions", data=episode.actions, dtype=np.float32)
    for name, values in (("terminated", solved), ("truncated", cut), ("success", solved)):
        group.create_dataset(name, data=values, dtype=bool)
    for name, values in episode.states.items():
        group.create_dataset(f"env_states/{name}", data=values, dtype=np.float32)


def _env_info(recording: Recording) -> dict[str, object]:
    kwargs = {"control_mode": recording.control_mode, "obs_mode": "none", "robot_uids": recording.robot}
    info: dict[str, object] = {
        "env_id": recording.task,
        "env_kwargs": {name: value for name, value in kwargs.items() if value is not None},
    }
    return info | ({} if recording.horizon is None else {"max_episode_steps": recording.horizon})


def _described(number: int, episode: RecordedEpisode, recording: Recording) -> dict[str, object]:
    return {
        "episode_id": number,
        "episode_seed": episode.seed,
        "control_mode": recording.control_mode,
        "elapsed_steps": len(episode.actions),
        "reset_kwargs": {"seed": episode.seed, "options": None},
        "success": bool(episode.solved[-1]),
    }
