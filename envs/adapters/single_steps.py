"""A `VectorEnv` of this project stepped one env step at a time, with numpy arrays: what the adapters have in common.

An episode's seed is a function of (seed given to reset, row, number of the episode), so that a training repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from gymnasium import spaces

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS, EnvSpec, EpisodeEnd, Observation, VectorEnv
from rlinf_embodied.randomness import reset_seed

Seen = np.ndarray | dict[str, np.ndarray]  # of N rows


class Shown(StrEnum):
    """What of an observation the other library's policy sees."""

    state = "state"  # all that the simulator knows, without the clock
    proprio = "proprio"  # what the robot may know
    image = "image"  # the first camera's
    dict = "dict"  # proprio and image under these names


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one env step of all rows gave."""

    seen: Seen  # after any reset
    rewards: np.ndarray  # float32 [N]
    terminated: np.ndarray  # bool [N]
    truncated: np.ndarray  # bool [N]
    final: Mapping[int, Seen]  # of rows whose episode ended, before the reset, one row each
    ends: Mapping[int, EpisodeEnd]  # of the same rows


class SingleSteps:
    """N rows of an env with chunks of one action, reset one by one when their episodes end."""

    def __init__(self, env: VectorEnv, shown: Shown | str) -> None:
        """Takes the env.

        Raises:
            ConfigError: its chunks have several actions, or it does not have what is to be shown.
        """
        self.env, self.spec = env, env.spec
        if shown not in list(Shown):
            raise ConfigError(f"observations is {shown!r}, but there are {', '.join(Shown)}: use one of these")
        self.shown = Shown(shown)
        _require_fit(self.spec, self.shown)
        self.num_envs = self.spec.num_envs
        self.observation_space = _observation_space(self.spec, self.shown)
        self.action_space = _action_space(self.spec)
        self._seed = 0
        self._numbers = np.zeros(self.num_envs, np.int64)  # of each row's episode

    def reset(self, seeds: Sequence[int] | None, rows: Sequence[int] | None = None) -> Seen:
        """Starts an episode in each of these rows (default: all); returns what all rows show.

        Args:
            seeds: one per row; the first one also decides the seeds of episodes that follow.  None: the next ones.
            rows: which; None: all.
        """
        rows = range(self.num_envs) if rows is None else rows
        if seeds is None:
            self._numbers[list(rows)] += 1
            every = self._seeds()
            seeds = [every[row] for row in rows]
        else:
            self._seed = int(seeds[0]) % 2**31
            self._numbers[list(rows)] = 0
        return self.seen(self.env.reset(list(seeds), list(rows)))

    def step(self, actions: np.ndarray) -> Stepped:
        """Runs one step of all rows.

        Args:
            actions: float [N, A] in [-1, 1]; of a categorical env numbers [N].
        """
        upcoming = self._seeds(1)
        result = self.env.step_chunk(self._chunk(actions), upcoming)
        ends = {end.row: end for end in result.episodes}
        self._numbers[list(ends)] += 1
        final = {}
        if result.final_observation is not None:
            every = self.seen(result.final_observation)
            for k, row in enumerate(result.final_rows):
                final[row] = {n: v[k] for n, v in every.items()} if isinstance(every, dict) else every[k]
        rewards, terminated, truncated = (
            x[:, 0].cpu().numpy() for x in (result.rewards, result.terminated, result.truncated)
        )
        return Stepped(self.seen(result.observation), rewards, terminated, truncated, final, ends)

    def seen(self, observation: Observation) -> Seen:
        """Returns what is shown of an observation, with its rows."""
        parts: dict[str, np.ndarray] = {}
        if self.shown is Shown.state:
            assert observation.privileged is not None
            parts["state"] = observation.privileged[:, :-CLOCK_COLUMNS].cpu().numpy()
        if self.shown in (Shown.proprio, Shown.dict):
            parts["proprio"] = observation.proprio.cpu().numpy()
        if self.shown in (Shown.image, Shown.dict):
            parts["image"] = next(iter(observation.images.values())).cpu().numpy()
        return parts if self.shown is Shown.dict else next(iter(parts.values()))

    def close(self) -> None:
        self.env.close()

    def _seeds(self, ahead: int = 0) -> list[int]:
        """Returns the seed of each row's episode of the number it has, or of a later one."""
        return reset_seed(self._seed, np.arange(self.num_envs), self._numbers + ahead).tolist()

    def _chunk(self, actions: np.ndarray) -> torch.Tensor:
        values = np.asarray(actions)
        if self.spec.categorical:
            values = np.eye(self.spec.action_dim, dtype=np.float32)[values.reshape(-1)] * 2 - 1
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))[:, None]


def _require_fit(spec: EnvSpec, shown: Shown) -> None:
    if spec.chunk != 1:
        raise ConfigError(f"env.chunk is {spec.chunk}, but other libraries choose one action at a time: use 1")
    if shown in (Shown.image, Shown.dict) and not spec.cameras:
        raise ConfigError(f"observations is {shown.value!r}, but env.cameras is []: name a camera, or use 'state'")


def _observation_space(spec: EnvSpec, shown: Shown) -> spaces.Space:
    vector = lambda size: spaces.Box(-np.inf, np.inf, (size,), np.float32)  # noqa: E731
    if shown is Shown.state:
        return vector(spec.privileged_dim - CLOCK_COLUMNS)
    if shown is Shown.proprio:
        return vector(spec.proprio_dim)
    image = spaces.Box(0, 255, (*spec.image_sizes[0], 3), np.uint8)
    return image if shown is Shown.image else spaces.Dict({"image": image, "proprio": vector(spec.proprio_dim)})


def _action_space(spec: EnvSpec) -> spaces.Space:
    if spec.categorical:
        return spaces.Discrete(spec.action_dim)
    return spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
