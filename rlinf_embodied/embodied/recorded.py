"""Demonstrations from files: recorded actions replayed in the run's own simulator, or images that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.data.lerobot import ACTION, STATE, LeRobotDataset, LeRobotEpisode
from rlinf_embodied.data.maniskill_h5 import RecordedEpisode, read_recording
from rlinf_embodied.embodied.demonstrations import Demonstrations, join
from rlinf_embodied.embodied.file_checks import require_actions, require_finite
from rlinf_embodied.embodied.warm_start_source import Kind, Source
from rlinf_embodied.errors import ConfigError, DataError
from rlinf_embodied.interfaces.envs import EnvSpec, FeatureKind, Observation, VectorEnv


class Recorded(Protocol):
    """The episodes of a file or folder."""

    @property
    def num_rows(self) -> int | None:
        """Rows of the simulator that it needs; None: as many as are stepped together."""
        ...

    def require(self, env: VectorEnv) -> None:
        """Checks what only the env knows: sizes of actions and state, and its instructions.

        Raises:
            DataError: actions or states of another size than the env's.
            ConfigError: the run's instruction is none of the dataset's tasks.
        """
        ...

    def demonstrate(self, env: VectorEnv, numbers: Sequence[int]) -> list[Demonstrations | None]:
        """Returns what the episodes of these numbers demonstrate; None for one that does not solve the task.

        Raises:
            DataError: see `require`, or actions that a policy cannot say.
            ConfigError: see `require`.
        """
        ...


def open_recorded(source: Source) -> Recorded:
    """Returns the episodes of a source."""
    return (Replay if source.kind is Kind.maniskill else RecordedImages)(source.path, source.named)


class Replay:
    """A ManiSkill recording: its seeds and actions are run again, and seen by the run's own cameras."""

    num_rows = None

    def __init__(self, path: str, named: str) -> None:
        """Reads the file; `named` is the config path that gave it, for errors."""
        self._path, self._named = path, named
        self._episodes = read_recording(Path(path), named).episodes

    def require(self, env: VectorEnv) -> None:
        theirs = self._episodes[0].actions.shape[1]
        _require_size(self._named, self._path, "actions", theirs, env.spec.action_dim, "env.robot")

    def demonstrate(self, env: VectorEnv, numbers: Sequence[int]) -> list[Demonstrations | None]:
        """Replays one episode per row; one is kept if it solves the task again, up to its recorded end."""
        self.require(env)
        episodes = [self._episodes[number] for number in numbers]
        rows = list(range(len(episodes)))
        observation = env.reset([episode.seed for episode in episodes], rows)
        chunks = torch.stack([_chunks(episode, env.spec) for episode in episodes])
        seen: list[list[tuple[Observation, Tensor, Tensor | None]]] = [[] for _ in rows]
        solved = torch.zeros(len(rows), dtype=torch.bool)
        lengths = [-(-len(episode.actions) // env.spec.chunk) for episode in episodes]
        for step in range(min(max(lengths), chunks.shape[1])):
            positions = env.object_positions()
            actions = torch.zeros(env.spec.num_envs, env.spec.chunk, env.spec.action_dim)
            actions[: len(rows)] = chunks[:, step]
            result = env.step_chunk(actions)
            for row in (row for row in rows if step < lengths[row]):
                where = None if positions is None else positions[row].cpu()
                seen[row].append((observation.rows([row]).to("cpu"), chunks[row, step], where))
                solved[row] |= bool(result.success[row].any())
            observation = result.observation
        return [join(parts) if solved[row] else None for row, parts in enumerate(seen)]


def _chunks(episode: RecordedEpisode, spec: EnvSpec) -> Tensor:
    """Returns the actions as chunks [H, C, A] that reach the horizon; the last one is repeated."""
    index = np.minimum(np.arange(spec.chunks_per_episode * spec.chunk), len(episode.actions) - 1)
    return torch.from_numpy(episode.actions[index]).reshape(-1, spec.chunk, spec.action_dim)


class RecordedImages:
    """A LeRobot dataset: it has seen already what there is to see, so the simulator is asked for its sizes only."""

    num_rows = 1

    def __init__(self, path: str, named: str) -> None:
        """Reads the descriptions; `named` is the config path that gave it, for errors."""
        self._path, self._named = path, named
        self._dataset = LeRobotDataset(Path(path), named)
        self._instruction: str | None = None

    def require(self, env: VectorEnv) -> None:
        info, spec = self._dataset.info, env.spec
        both = "env.control_mode, env.robot"
        _require_size(self._named, self._path, ACTION, info.size(ACTION), spec.action_dim, both)
        _require_size(self._named, self._path, STATE, info.size(STATE), spec.proprio_dim, "env.robot")
        self._require_instruction(env)

    def demonstrate(self, env: VectorEnv, numbers: Sequence[int]) -> list[Demonstrations | None]:
        """Returns every episode as it is in the files."""
        self.require(env)
        spec = env.spec
        episodes = self._dataset.read(numbers, slice(None, None, spec.chunk), spec.cameras)
        return [self._demonstration(number, e, spec) for number, e in zip(numbers, episodes, strict=True)]

    def _require_instruction(self, env: VectorEnv) -> None:
        if self._instruction is None:
            self._instruction = env.state().instruction[0]
        if self._instruction not in self._dataset.tasks:
            known = ", ".join(repr(task) for task in self._dataset.tasks)
            raise ConfigError(
                f"env.instruction is {self._instruction!r}, but the tasks of {self._named}={self._path} are {known}, "
                f"and a policy knows the words that it learned: set env.instruction={self._dataset.tasks[0]!r}"
            )

    def _demonstration(self, number: int, episode: LeRobotEpisode, spec: EnvSpec) -> Demonstrations:
        require_actions(f"{self._named} is {self._path!r}", f"episode {number}", episode.actions)
        require_finite(f"{self._named} is {self._path!r}", number, episode.state)
        starts = np.arange(0, len(episode), spec.chunk)
        index = np.minimum(starts[:, None] + np.arange(spec.chunk), len(episode) - 1)
        parts = spec.of_kind(FeatureKind.state)
        vectors = torch.from_numpy(episode.state[starts]).split([part.shape[0] for part in parts], 1)
        observation = Observation(
            state={part.name: vector for part, vector in zip(parts, vectors, strict=True)},
            instruction=(episode.task,) * len(starts),
            images={name: torch.from_numpy(episode.images[name]) for name in spec.cameras},
        )
        return Demonstrations(observation, torch.from_numpy(episode.actions[index].clip(-1, 1)), None)


def _require_size(named: str, path: str, name: str, theirs: int | None, ours: int, settings: str) -> None:
    if theirs != ours:
        raise DataError(
            f"{named} is {path!r}, whose {name} have {theirs} dimensions, but those of the env have {ours}: set "
            f"{settings} as they were when it was recorded"
        )
