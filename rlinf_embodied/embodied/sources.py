"""Where demonstrations come from: files, or the scripted expert; checked before the run starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig, Source, TrainConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.lerobot import LeRobotDataset
from rlinf_embodied.data.maniskill_h5 import read_recording
from rlinf_embodied.data.recorded import ACTION, STATE, RecordedDataset
from rlinf_embodied.data.rlds import DESCRIPTION, RldsDataset
from rlinf_embodied.data.statistics import Statistics, combine, vector_statistics
from rlinf_embodied.errors import DataError
from rlinf_embodied.plug_ins import env_options, load_plug_in, load_target

NUM_DATA_BLOCKS = 4  # of demonstrations: fixed, so that weights are the same under every plan


class Kind(StrEnum):
    """What shows how."""

    expert = "expert"  # the scripted expert of the task
    maniskill = "maniskill"  # a recorded trajectory file
    recorded = "recorded"  # a folder of LeRobot (v2 or v3) or RLDS, with images: no simulator runs


@dataclass(frozen=True, slots=True)
class DemonstrationSource:
    """A source of demonstrations, as plain values."""

    kind: Kind
    num_episodes: int
    path: str = ""
    digest: str = ""  # SHA-256 of what the files hold; of a dataset's large ones, of name, size and time
    named: str = ""  # the config path that gave it, for errors
    bounded: bool = True  # whether actions must lie in [-1, 1]
    weight: float | None = None  # its share of what an epoch draws; None: every chunk is drawn once
    convert: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of a dataset: conversions of actions, of the state

    @property
    def where(self) -> str:
        """The beginning of an error."""
        return f"{self.named} is {self.path!r}"

    def open(self) -> RecordedDataset:
        """Returns the dataset, its vectors in the conventions of the env."""
        return open_dataset(self.path, self.named, *self.convert)


def sources_of(config: TrainConfig) -> tuple[DemonstrationSource, ...]:
    """Returns where the demonstrations of an algorithm, or of a warm start, come from.

    Raises:
        ConfigError: files are missing, or of another task, control mode, camera or image size.
        DataError: files cannot be read, or hold too few episodes.
    """
    start, env = config.warm_start, config.env
    named, given, files = "warm_start.demonstrations", start.demonstrations, [start.demonstrations]
    if config.algorithm.uses_demonstrations and config.files:
        named, given, files = "data", config.data, config.files
    policy = config.policy  # one that others published normalises in any case
    published = getattr(load_target(policy._target_), "reads_published", False)
    bounded = policy.options.get("clip_actions", True) if published else policy.normalise_actions is None
    placed = [_weighted(place) for place in files if place is not None]
    if any(weight is not None for _, weight in placed):
        rule = "all paths have a weight above 0, as <path>:<weight>, or none has"
        holds = config.algorithm.learns_from is Source.demonstrations and all((w or 0) > 0 for _, w in placed)
        require(holds, named, given, f"weights are for algorithm=sft, and {rule}", "give every path a weight, or none")
    convert = tuple(start.convert_actions), tuple(start.convert_state)
    found = tuple(replace(_file(place, env, named, bounded, convert), weight=weight) for place, weight in placed)
    rule = "what is converted are the vectors of LeRobot and RLDS datasets"
    holds = not any(convert) or (found and all(source.kind is Kind.recorded for source in found))
    path = "warm_start.convert_actions" if convert[0] else "warm_start.convert_state"
    require(bool(holds), path, list(convert[0] or convert[1]), rule, "leave it out, or give datasets only")
    if not found:
        return (DemonstrationSource(Kind.expert, start.num_demos),)
    if (number := sum(source.num_episodes for source in found)) < NUM_DATA_BLOCKS:
        raise DataError(
            f"{named} is {given!r}, which holds {number} episodes, but each of the {NUM_DATA_BLOCKS} blocks of "
            "demonstrations needs at least one: record more"
        )
    return found


def _weighted(place: str) -> tuple[str, float | None]:
    path, _, number = place.rpartition(":")
    try:
        return (path, float(number)) if path else (place, None)
    except ValueError:  # a path may hold a colon
        return place, None


def _file(
    place: str, env: EnvConfig, named: str, bounded: bool, convert: tuple[tuple[str, ...], tuple[str, ...]]
) -> DemonstrationSource:
    """Returns a trajectory file or a dataset folder, after all checks that need no simulator."""
    reader, kinds = place.rpartition("@")[0], "a trajectory file of ManiSkill (.h5) or the folder of a dataset"
    path = Path(place.rpartition("@")[2])
    require(path.exists(), named, place, "there is nothing", f"give {kinds}")
    whole = path.absolute()  # a link has the name that tells what it is, its target may not
    if path.suffix in (".h5", ".hdf5") and not reader:
        kind, files = Kind.maniskill, [path, path.with_suffix(".json")]
        number = _require_recording(path, env, named, bounded)
    elif path.is_file() and not reader:
        raise DataError(f"{named} is {place!r}, but a file is known by its ending .h5: give {kinds}")
    else:
        dataset = open_dataset(place, named, *convert)
        kind, number = Kind.recorded, _require_dataset(dataset, env, f"{named}={path}")
        files = [file for file in sorted(whole.rglob("*")) if file.is_file()] or [whole]
    digest = hashlib.sha256(repr(convert).encode() if any(convert) else b"")
    for file in files:
        if kind is Kind.recorded:
            digest.update(f"{file.relative_to(whole)}\n".encode())
        if kind is Kind.recorded and file.suffix not in (".json", ".jsonl"):  # a dataset may be larger than memory
            digest.update(f"{file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
            continue
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    read = f"{reader}@{whole}" if reader else str(whole)
    return DemonstrationSource(kind, number, read, digest.hexdigest(), named, bounded, convert=convert)


def open_dataset(
    place: str | Path, named: str, convert_actions: Sequence[str] = (), convert_state: Sequence[str] = ()
) -> RecordedDataset:
    """Returns a dataset folder of LeRobot or RLDS, or <module>.<class>@<path>, converted (data/conversions.py).

    Raises:
        DataError: it is none.
        ConfigError: there is no such class, or a conversion does not fit the dataset.
    """
    reader, _, place = str(place).rpartition("@")
    path = Path(place)
    if reader:
        dataset = cast(RecordedDataset, load_plug_in(reader, named)(path, named))
    else:
        dataset = (RldsDataset if (path / DESCRIPTION).exists() else LeRobotDataset)(path, named)
    if not (convert_actions or convert_state):
        return dataset
    from rlinf_embodied.data.conversions import ConvertedDataset  # SciPy takes long, and few runs need it

    return ConvertedDataset(dataset, convert_actions, convert_state, "warm_start")


def _require_recording(path: Path, env: EnvConfig, named: str, bounded: bool) -> int:
    """Returns the number of episodes."""
    recording, where = read_recording(path, named), f"{named} is {str(path)!r}"
    ours = getattr(env_options(env), "control_mode", None)  # some envs have none
    require(env.task == recording.task, "env.task", env.task, f"{where}, recorded with {recording.task!r}", "use that")
    rule = f"{where}, recorded with {recording.control_mode!r}"
    action = "use that, or convert it: python -m mani_skill.trajectory.replay_trajectory -c <control mode> --save-traj"
    require(ours in (None, recording.control_mode), "env.options.control_mode", ours, rule, action)
    for episode in recording.episodes:
        require_actions(where, episode.name, episode.actions, bounded)
    sizes = sorted({episode.actions.shape[1] for episode in recording.episodes})
    if len(sizes) > 1:
        raise DataError(f"{where}, but its actions have {sizes} dimensions: split the file")
    longest = max(len(episode.actions) for episode in recording.episodes)
    rule = f"{named}={path} has episodes of up to {longest} env steps, whose ends would be missing"
    require(longest <= env.horizon, "env.horizon", env.horizon, rule, f"set env.horizon={longest}")
    return len(recording.episodes)


def _require_dataset(dataset: RecordedDataset, env: EnvConfig, where: str) -> int:
    """Returns the number of episodes."""
    for name, found in ((ACTION, dataset.size(ACTION)), (STATE, dataset.states)):
        if not found:
            raise DataError(f"{where} has no vectors called {name!r}, but {', '.join(dataset.features)}: add them")
    missing = [name for name in env.cameras if name not in dataset.cameras]
    rule, action = f"{where} has images of {', '.join(dataset.cameras) or 'no camera'}", "name cameras that it has"
    require(bool(env.cameras) and not missing, "env.cameras", env.cameras, rule, action)
    own = getattr(env_options(env), "image_size", None)
    for name in env.cameras:
        height, width = dataset.image_size(name)
        rule, action = f"{dataset.cameras[name]} of {where} is {width} x {height}", f"set env.obs_size={width}"
        if width != height or own:
            action = f"set env.options.image_size=[{height}, {width}] (Gymnasium), or give a dataset with square images"
        path, wanted = ("env.options.image_size", own) if own else ("env.obs_size", [env.obs_size] * 2)
        require([height, width] == wanted, path, own or env.obs_size, rule, action)
    return dataset.num_episodes


def require_actions(where: str, episode: str, actions: np.ndarray, bounded: bool) -> None:
    """Checks that the actions [T, A] of an episode are finite and, if `bounded`, what the network can say."""
    wrong = ~(np.isfinite(actions) & ((np.abs(actions) <= 1 + 1e-5) | (not bounded)))
    if wrong.any():
        step, dimension = (int(k) for k in np.argwhere(wrong)[0])
        rule = "those of a policy lie in [-1, 1]"
        action = "set policy.normalise_actions=min_max (pi0, SmolVLA, OpenVLA: policy.options.clip_actions=false), "
        action += "with which the env is handed actions in these units"
        if not np.isfinite(actions[step, dimension]):
            rule, action = "actions are finite", "record it anew"
        raise DataError(
            f"{where}, but action {dimension} of step {step} of {episode} is {actions[step, dimension]}, and {rule}: "
            f"leave the episode out, or {action}"
        )


def statistics_of(
    sources: Sequence[DemonstrationSource], relative: Sequence[bool] = (), chunk: int = 1
) -> dict[str, dict[str, Tensor]]:
    """Returns statistics of actions and state in files, float32 [A] and [P]; of the state if no simulator shows it.

    With `relative`, as RecordedDataset.relative_action_statistics takes it, those of actions in chunks of `chunk`.

    Raises:
        ConfigError: actions are relative to a state that a file does not hold.
    """
    found: dict[str, list[Statistics]] = {ACTION: [], STATE: []}
    for source in sources:
        path = Path(source.path)
        if source.kind is Kind.recorded:
            dataset = source.open()
            of = dataset.statistics([ACTION, *dataset.states])
            absolute = of.pop(ACTION)
            found[ACTION].append(dataset.relative_action_statistics(chunk, relative) if any(relative) else absolute)
            kinds = set.intersection(*({*part} for part in of.values())) - {"count"}
            beside = {kind: np.concatenate([part[kind].reshape(-1) for part in of.values()]) for kind in kinds}
            found[STATE].append(beside | {"count": next(iter(of.values()))["count"]})
        elif source.kind is Kind.maniskill:
            rule = "the policy's actions are relative to the state, which a trajectory file does not hold"
            require(not any(relative), source.named, source.path, rule, "use a LeRobot dataset")
            episodes = read_recording(path, source.named).episodes
            found[ACTION].append(combine(vector_statistics(episode.actions) for episode in episodes))
    as_tensors = lambda part: {kind: torch.from_numpy(value).float() for kind, value in part.items()}  # noqa: E731
    return {name: as_tensors(combine(parts)) for name, parts in found.items() if len(parts) == len(sources)}
