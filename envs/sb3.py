"""An env of this project as a Stable-Baselines3 `VecEnv`.

    import envs.sb3

    vec_env = envs.sb3.make_sb3("PickCube-v1", num_envs=32)

An episode's seed is a function of (seed given to `seed`, row, number of the episode), so that a training is repeatable.
"""

from __future__ import annotations

import time
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn

from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS, EnvSpec, FeatureKind, Observation, VectorEnv
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.randomness import reset_seed

Arrays = np.ndarray | dict[str, np.ndarray]  # an observation of N rows, or of one


class ObservationKind(StrEnum):
    """Which part of an observation SB3's policy receives."""

    state = "state"  # the simulator's full state, without the clock
    proprio = "proprio"  # the robot's proprioception
    dict = "dict"  # proprio, and the first camera's image


class StableBaselinesVec(VecEnv):
    """N rows behind SB3's interface; info has the entries that SB3's Monitor would add, so it needs no Monitor.

    The info of an episode's last step has terminal_observation, TimeLimit.truncated, episode and, where the task can be
    solved, is_success.
    """

    def __init__(self, env: VectorEnv, observations: ObservationKind | str = ObservationKind.state) -> None:
        """Wraps an env.

        Raises:
            ConfigError: its chunks have several actions, or it lacks the requested observations.
        """
        if observations not in list(ObservationKind):
            choices = ", ".join(ObservationKind)
            raise ConfigError(f"observations is {observations!r}, but it must be one of {choices}")
        self._env, self._kind = env, ObservationKind(observations)
        if env.spec.chunk != 1:
            raise ConfigError(f"env.chunk is {env.spec.chunk}, but SB3 chooses one action at a time: use 1")
        if self._kind is ObservationKind.dict and not env.spec.cameras:
            raise ConfigError("observations is 'dict', but env.cameras is []: name a camera, or use 'state'")
        self._seed, self._numbers = 0, np.zeros(env.spec.num_envs, np.int64)  # of each row's episode
        self._actions = np.zeros(0)
        self._start_s = time.time()
        size, discrete = (env.spec.action_dim,), spaces.Discrete(env.spec.action_dim)
        actions = discrete if env.spec.categorical else spaces.Box(-1.0, 1.0, size, np.float32)
        super().__init__(env.spec.num_envs, _observation_space(env.spec, self._kind), actions)

    def reset(self) -> VecEnvObs:
        """Starts an episode in every row, with the seeds given to `seed` if it was called before."""
        seeds = [seed for seed in self._seeds if seed is not None]
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        if len(seeds) == self.num_envs:
            self._seed, self._numbers[:] = int(seeds[0]) % 2**31, 0
        else:
            self._numbers += 1
            seeds = self._episode_seeds()
        return self._arrays(self._env.reset([int(seed) for seed in seeds]))

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        result = self._env.step_chunk(self._chunk(self._actions), self._episode_seeds(1))
        rewards, terminated, truncated = (
            column[:, 0].cpu().numpy() for column in (result.rewards, result.terminated, result.truncated)
        )
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        now_s = round(time.time() - self._start_s, 6)
        for episode in result.episodes:
            self._numbers[episode.row] += 1
            assert result.final_observation is not None
            last = self._arrays(result.final_observation.rows([result.final_rows.index(episode.row)]))
            metrics = episode.metrics
            info = {"episode": {"r": metrics["return"], "l": int(metrics["episode_len"]), "t": now_s}}
            if "success_once" in metrics:
                info["is_success"] = bool(metrics["success_once"])
            info["terminal_observation"] = (
                {name: value[0] for name, value in last.items()} if isinstance(last, dict) else last[0]
            )
            info["TimeLimit.truncated"] = bool(truncated[episode.row])
            infos[episode.row] = info
        return self._arrays(result.observation), rewards, terminated | truncated, infos

    def close(self) -> None:
        self._env.close()

    def _arrays(self, observation: Observation) -> Arrays:
        """Returns the requested part of an observation, with its rows."""
        if self._kind is ObservationKind.state:
            assert observation.privileged is not None
            return observation.privileged[:, :-CLOCK_COLUMNS].cpu().numpy()
        proprio = observation.proprio.cpu().numpy()
        if self._kind is ObservationKind.proprio:
            return proprio
        return {"proprio": proprio, "image": next(iter(observation.images.values())).cpu().numpy()}

    def _episode_seeds(self, ahead: int = 0) -> list[int]:
        """Returns the seed of each row's current episode, or of the one `ahead` episodes later."""
        return reset_seed(self._seed, np.arange(self.num_envs), self._numbers + ahead).tolist()

    def _chunk(self, actions: np.ndarray) -> torch.Tensor:
        values = np.asarray(actions)
        if self._env.spec.categorical:
            values = np.eye(self._env.spec.action_dim, dtype=np.float32)[values.reshape(-1)] * 2 - 1
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))[:, None]

    # ------------------------------------------------------------------------------------- rows are not env objects
    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Returns what all rows share: render_mode (None), spec, and attributes of this object."""
        shared = {"render_mode": None, "spec": self._env.spec}
        value = shared[attr_name] if attr_name in shared else getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise AttributeError(f"rows are not env objects, so {attr_name} cannot be set: make another env")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        raise AttributeError(f"rows are not env objects, so {method_name} cannot be called")

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Returns True for Monitor, whose entries are in info, and False for all others."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]


def _observation_space(spec: EnvSpec, kind: ObservationKind) -> spaces.Space:
    if kind is ObservationKind.state:
        return spaces.Box(-np.inf, np.inf, (spec.privileged_dim - CLOCK_COLUMNS,), np.float32)
    proprio = spaces.Box(-np.inf, np.inf, (spec.proprio_dim,), np.float32)
    if kind is ObservationKind.proprio:
        return proprio
    (image, *_) = spec.of_kind(FeatureKind.image)
    return spaces.Dict({"image": spaces.Box(0, 255, image.shape, np.uint8), "proprio": proprio})


def make_sb3(
    env: str | EnvConfig = "PickCube-v1",
    num_envs: int = 1,
    *,
    observations: ObservationKind | str = ObservationKind.state,
    **settings: object,
) -> StableBaselinesVec:
    """Returns rows of any env of this project as a Stable-Baselines3 `VecEnv`.

    Args:
        env: a ManiSkill task, or the section `env` of a config, with env.chunk=1.
        num_envs: rows N.
        observations: "state" (the simulator's full state), "proprio", or "dict" (proprio and image).
        settings: keys of the section env (horizon, cameras, obs_size, ...) or of env.options (robot, ...).

    Raises:
        ConfigError: a setting cannot be used.
        SimulatorError: the env cannot be built.
    """
    if isinstance(env, str):  # its dense reward, and an end at success, as with `gym.make`
        plain = {"chunk": 1, "cameras": [], "reward": Reward.dense, "success_bonus": 0.0, "hold_steps": 1}
        settings, env = {"task": env, **plain, **settings}, EnvConfig()
    known = {field.name for field in fields(EnvConfig)}
    keys: dict[str, Any] = {name: value for name, value in settings.items() if name in known}
    options = env.options | {name: value for name, value in settings.items() if name not in known}
    config = replace(env, num_envs=num_envs, block_size=num_envs, options=options, **keys)
    rows = load_target(config._target_)(config, num_envs, "cpu", True)
    return StableBaselinesVec(cast(VectorEnv, rows), observations)
