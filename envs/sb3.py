"""An env of this project as a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn

from envs.adapters import GymnasiumVector, Shown
from rlinf_embodied.interfaces.envs import VectorEnv


class StableBaselinesVec(VecEnv):
    """N rows behind SB3's interface; info has what SB3's Monitor would add, so that none is needed.

    The info of an episode's last step has terminal_observation, TimeLimit.truncated, episode and, where the task can be
    solved, is_success.
    """

    def __init__(self, env: VectorEnv, observations: Shown | str = Shown.state) -> None:
        """Wraps an env; see GymnasiumVector for errors."""
        self._rows = GymnasiumVector(env, observations)
        self._actions = np.zeros(0)
        self._start_s = time.time()
        super().__init__(self._rows.num_envs, self._rows.single_observation_space, self._rows.single_action_space)

    def reset(self) -> VecEnvObs:
        """Starts an episode in every row, with the seeds of `seed` where it was called before."""
        seeds = [seed for seed in self._seeds if seed is not None]
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return self._rows.reset(seed=seeds if len(seeds) == self.num_envs else None)[0]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        seen, rewards, terminated, truncated, ends = self._rows.advance(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        now_s = round(time.time() - self._start_s, 6)
        for row, (final, info) in ends.items():
            infos[row] = {**info, "terminal_observation": final, "TimeLimit.truncated": bool(truncated[row])}
            infos[row]["episode"]["t"] = now_s
        return seen, rewards, terminated | truncated, infos

    def close(self) -> None:
        self._rows.close()

    # ------------------------------------------------------------------------------------- rows are not env objects
    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Returns what all rows share: render_mode (None), spec, and attributes of this object."""
        shared = {"render_mode": None, "spec": self._rows.env.spec}
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

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [None] * self.num_envs
