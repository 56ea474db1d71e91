"""An env of this project for other libraries: a `gymnasium.vector.VectorEnv`, and Stable-Baselines3's `VecEnv`.

    import envs.adapters

    vector_env = envs.adapters.make_vector("PickCube-v1", num_envs=32)
    vec_env = envs.adapters.make_sb3("PickCube-v1", num_envs=32)

An episode's seed is a function of (seed given to reset, row, number of the episode), so that a training is repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS, EnvSpec, Observation, VectorEnv
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.randomness import reset_seed

if TYPE_CHECKING:
    from envs.sb3 import StableBaselinesVec

Seen = np.ndarray | dict[str, np.ndarray]  # of N rows, or of one


class Shown(StrEnum):
    """Which part of an observation the other library's policy receives."""

    state = "state"  # all that the simulator knows, without the clock
    proprio = "proprio"  # what the robot may know
    image = "image"  # the first camera's
    dict = "dict"  # proprio and image under these names


class GymnasiumVector(gymnasium.vector.VectorEnv):
    """N rows with chunks of one action: autoreset mode SAME_STEP, final observations in info["final_obs"]."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, env: VectorEnv, observations: Shown | str = Shown.state) -> None:
        """Wraps an env.

        Raises:
            ConfigError: its chunks have several actions, or it lacks the requested observations.
        """
        if observations not in list(Shown):
            raise ConfigError(f"observations is {observations!r}, but it must be one of {', '.join(Shown)}")
        self.env, self.shown = env, Shown(observations)
        _require_fit(env.spec, self.shown)
        self.num_envs = env.spec.num_envs
        self.single_observation_space = _observation_space(env.spec, self.shown)
        self.single_action_space = _action_space(env.spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._seed = 0
        self._numbers = np.zeros(self.num_envs, np.int64)  # of each row's episode

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Starts an episode in every row, or in those of options["reset_mask"], bool [N].

        Args:
            seed: of row 0, row i has seed + i; or one per row; None: the next ones.  The first one also decides the
                seeds of the episodes that follow.
            options: no other option is known.

        Raises:
            ConfigError: the number of seeds or mask entries differs from that of the rows.
        """
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))
        given = [seed + row for row in range(self.num_envs)] if isinstance(seed, int | np.integer) else seed
        for name, value in (("options['reset_mask']", mask), ("seed", given)):
            if value is not None and len(value) != self.num_envs:
                raise ConfigError(f"{name} has {len(value)} entries for {self.num_envs} rows: give one per row")
        super().reset(seed=seed if isinstance(seed, int) else None)
        rows = np.flatnonzero(mask).tolist()
        if given is None or any(given[row] is None for row in rows):
            self._numbers[rows] += 1
            given = self._seeds()
        else:
            self._seed = int(cast(int, given[rows[0]])) % 2**31
            self._numbers[rows] = 0
        return self._seen(self.env.reset([int(cast(int, given[row])) for row in rows], rows)), {}

    def step(self, actions: np.ndarray) -> tuple[Seen, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Runs one step of all rows; info has final_obs and final_info with its episode, each with its mask.

        The episode is in final_info only: RecordEpisodeStatistics refuses an env that also reports it outside.
        """
        seen, rewards, terminated, truncated, ends = self.advance(actions)
        infos: dict[str, Any] = {}
        for row, (final, info) in ends.items():
            infos = self._add_info(infos, {"final_obs": final, "final_info": info}, row)
        return seen, rewards, terminated, truncated, infos

    def advance(
        self, actions: np.ndarray
    ) -> tuple[Seen, np.ndarray, np.ndarray, np.ndarray, dict[int, tuple[Seen, dict[str, Any]]]]:
        """Runs one step of all rows; the last value has the final observation and info of the episodes that ended.

        Args:
            actions: float [N, A] in [-1, 1]; of a categorical env numbers [N].
        """
        result = self.env.step_chunk(self._chunk(actions), self._seeds(1))
        ends = {}
        for episode in result.episodes:
            self._numbers[episode.row] += 1
            assert result.final_observation is not None
            final = self._seen(result.final_observation.rows([result.final_rows.index(episode.row)]))
            one = {name: value[0] for name, value in final.items()} if isinstance(final, dict) else final[0]
            metrics = episode.metrics
            info: dict[str, Any] = {"episode": {"r": metrics["return"], "l": int(metrics["episode_len"])}}
            if "success_once" in metrics:
                info["is_success"] = bool(metrics["success_once"])
            ends[episode.row] = one, info
        flags = (column[:, 0].cpu().numpy() for column in (result.rewards, result.terminated, result.truncated))
        return self._seen(result.observation), *flags, ends

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()

    def _seen(self, observation: Observation) -> Seen:
        """Returns the requested part of an observation, with its rows."""
        parts: dict[str, np.ndarray] = {}
        if self.shown is Shown.state:
            assert observation.privileged is not None
            parts["state"] = observation.privileged[:, :-CLOCK_COLUMNS].cpu().numpy()
        if self.shown in (Shown.proprio, Shown.dict):
            parts["proprio"] = observation.proprio.cpu().numpy()
        if self.shown in (Shown.image, Shown.dict):
            parts["image"] = next(iter(observation.images.values())).cpu().numpy()
        return parts if self.shown is Shown.dict else next(iter(parts.values()))

    def _seeds(self, ahead: int = 0) -> list[int]:
        """Returns the seed of each row's current episode, or of one that many episodes ahead."""
        return reset_seed(self._seed, np.arange(self.num_envs), self._numbers + ahead).tolist()

    def _chunk(self, actions: np.ndarray) -> torch.Tensor:
        values = np.asarray(actions)
        if self.env.spec.categorical:
            values = np.eye(self.env.spec.action_dim, dtype=np.float32)[values.reshape(-1)] * 2 - 1
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))[:, None]


def _require_fit(spec: EnvSpec, shown: Shown) -> None:
    if spec.chunk != 1:
        raise ConfigError(f"env.chunk is {spec.chunk}, but other libraries choose one action at a time: use 1")
    if shown in (Shown.image, Shown.dict) and not spec.cameras:
        raise ConfigError(f"observations is {shown.value!r}, but env.cameras is []: name a camera, or use 'state'")


def _observation_space(spec: EnvSpec, shown: Shown) -> spaces.Space:
    state, proprio = (
        spaces.Box(-np.inf, np.inf, (size,), np.float32)
        for size in (spec.privileged_dim - CLOCK_COLUMNS, spec.proprio_dim)
    )
    if shown in (Shown.state, Shown.proprio):
        return state if shown is Shown.state else proprio
    image = spaces.Box(0, 255, (*spec.image_sizes[0], 3), np.uint8)
    return image if shown is Shown.image else spaces.Dict({"image": image, "proprio": proprio})


def _action_space(spec: EnvSpec) -> spaces.Space:
    if spec.categorical:
        return spaces.Discrete(spec.action_dim)
    return spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)


def make_vector(
    env: str | EnvConfig = "PickCube-v1",
    num_envs: int = 1,
    *,
    observations: Shown | str = Shown.state,
    **settings: object,
) -> GymnasiumVector:
    """Returns rows of any env of this project as a `gymnasium.vector.VectorEnv` with numpy arrays.

    Args:
        env: a ManiSkill task, or the section `env` of a config, whose chunks must be of one action.
        num_envs: rows N.
        observations: "state" (all that the simulator knows), "proprio", "image" or "dict".
        settings: of the section (rlinf_embodied/config/env.py): horizon, robot, control_mode, cameras, obs_size, ...

    Raises:
        ConfigError: a setting cannot be used.
        SimulatorError: the env cannot be built.
    """
    return GymnasiumVector(_rows_of(env, num_envs, settings), observations)


def make_sb3(
    env: str | EnvConfig = "PickCube-v1",
    num_envs: int = 1,
    *,
    observations: Shown | str = Shown.state,
    **settings: object,
) -> StableBaselinesVec:
    """Returns rows of any env of this project as a Stable-Baselines3 `VecEnv`; arguments as `make_vector`."""
    from envs.sb3 import StableBaselinesVec  # takes a second to import

    return StableBaselinesVec(_rows_of(env, num_envs, settings), observations)


def _rows_of(env: str | EnvConfig, num_envs: int, settings: Mapping[str, object]) -> VectorEnv:
    """Returns the rows; a ManiSkill task has its dense reward and ends at success, as with `gym.make`."""
    if isinstance(env, str):
        plain = {"chunk": 1, "cameras": [], "reward": Reward.dense, "success_bonus": 0.0, "hold_steps": 1}
        unknown = sorted(set(settings) - {field.name for field in fields(EnvConfig)})
        if unknown:
            raise ConfigError(f"{unknown[0]} is no setting of an env: see rlinf_embodied/config/env.py")
        asked = {"task": env, "num_envs": num_envs, "block_size": num_envs} | plain | dict(settings)
        config = EnvConfig(**asked)  # pyright: ignore[reportArgumentType]
    else:
        config = replace(env, num_envs=num_envs, block_size=num_envs, **settings)  # pyright: ignore[reportArgumentType]
    return cast(VectorEnv, load_target(config._target_)(config, num_envs, "cpu", True))
