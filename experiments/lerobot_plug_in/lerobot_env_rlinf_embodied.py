# pyright: reportMissingImports=false
"""The envs of this project in LeRobot, as a plug-in that lerobot 0.6 finds by its name (docs/gymnasium.md).

lerobot's process: RlinfEmbodiedEnv -> LeRobotVectorEnv  --- websocket --->  serve_env.py: N batched rows
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from envs import remote
from envs.episodes import EpisodeEnv
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.interfaces.envs import Observation

FILM_SIZE = 256


class LeRobotVectorEnv(gymnasium.vector.VectorEnv):
    """N rows as LeRobot sees them: pixels, agent_pos, is_success; a row that ends begins anew in the same step."""

    def __init__(self, env: EpisodeEnv) -> None:
        """Takes an env whose chunks have one action."""
        spec, self._env = env.spec, env
        self.num_envs, self.metadata = spec.num_envs, {"autoreset_mode": AutoresetMode.SAME_STEP}
        images: dict[str, Any] = {
            name: spaces.Box(0, 255, (*size, 3), np.uint8)
            for name, size in zip(spec.cameras, spec.image_sizes, strict=True)
        }
        state = spaces.Box(-np.inf, np.inf, (spec.proprio_dim,), np.float32)
        parts: dict[str, Any] = {"pixels": spaces.Dict(images)} if images else {}
        parts["agent_pos"] = state
        self.single_observation_space = spaces.Dict(parts)
        self.single_action_space = spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, spec.num_envs)
        self.action_space = batch_space(self.single_action_space, spec.num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts an episode in each row, from seeds, or from `seed`, `seed` + 1, ..."""
        if seed is None or isinstance(seed, int):
            seed = range(seed or 0, (seed or 0) + self.num_envs)
        self._next = max(seed) + 1
        return self._told(self._env.reset(list(seed))), {}

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Runs one control step; actions float32 [N, A] in [-1, 1]."""
        result = self._env.step_chunk(torch.from_numpy(np.array(actions, np.float32))[:, None], self._seeds())
        of = lambda column: column[:, 0].numpy()  # noqa: E731
        info: dict[str, Any] = {"is_success": of(result.success)}
        if ended := {end.row: end.metrics.get("success_once", 0.0) > 0 for end in result.episodes}:
            self._next += self.num_envs
            mask = np.isin(np.arange(self.num_envs), [*ended])
            solved = np.array([ended.get(row, False) for row in range(self.num_envs)])
            info |= {"final_info": {"is_success": solved, "_is_success": mask}, "_final_info": mask}
        return self._told(result.observation), of(result.rewards), of(result.terminated), of(result.truncated), info

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns an attribute of each row: task, task_description, _max_episode_steps, or what `render` shows.

        Raises:
            AttributeError: there is no such attribute.
        """
        rows, spec = range(self.num_envs), self._env.spec
        if name == "render":
            shown = self._env.simulator.film(list(rows), FILM_SIZE)
            return tuple(shown[row].numpy() for row in rows)
        if name == "task_description":
            return self._env.state().instruction
        known = {"task": spec.task, "_max_episode_steps": spec.horizon}
        if name not in known:
            raise AttributeError(f"rows have {', '.join(known)}, task_description and render, but no {name}")
        return (known[name],) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()

    def _seeds(self) -> list[int]:
        return list(range(self._next, self._next + self.num_envs))

    def _told(self, shown: Observation) -> dict[str, Any]:
        images = {name: image.numpy() for name, image in shown.images.items()}
        return {**({"pixels": images} if images else {}), "agent_pos": shown.proprio.numpy()}


if importlib.util.find_spec("lerobot") is not None:
    from lerobot import configs as lerobot
    from lerobot.envs import configs as lerobot_envs

    @lerobot_envs.EnvConfig.register_subclass("rlinf_embodied")
    @dataclass
    class RlinfEmbodiedEnv(lerobot_envs.EnvConfig):
        """What `lerobot-eval --env.type=rlinf_embodied` takes; url, task and sizes as serve_env.py prints them."""

        task: str | None = "PickCube-v1"
        url: str = "ws://localhost:8100"
        cameras: list[str] = field(default_factory=lambda: ["base_camera"])
        obs_size: int = 64
        episode_length: int = 50
        fps: int = 20
        state_dim: int = 22  # numbers of agent_pos
        action_dim: int = 7

        def __post_init__(self) -> None:
            of, kinds = lerobot.PolicyFeature, lerobot.FeatureType
            shape = (self.obs_size, self.obs_size, 3)
            self.features = {"action": of(kinds.ACTION, (self.action_dim,))}
            self.features |= {"agent_pos": of(kinds.STATE, (self.state_dim,))}
            self.features |= {f"pixels/{name}": of(kinds.VISUAL, shape) for name in self.cameras}
            self.features_map = {"action": "action", "agent_pos": "observation.state"}
            self.features_map |= {f"pixels/{name}": f"observation.images.{name}" for name in self.cameras}

        @property
        def gym_kwargs(self) -> dict[str, Any]:
            """Nothing: `create_envs` does not use gymnasium.make."""
            return {}

        def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, LeRobotVectorEnv]]:
            """Returns {type: {0: the rows}}; all rows are those of one server."""
            section = EnvConfig(
                _target_="envs.remote.make_env",
                task=str(self.task),
                cameras=list(self.cameras),
                num_envs=n_envs,
                block_size=n_envs,
                obs_size=self.obs_size,
                chunk=1,
                horizon=self.episode_length,
                hold_steps=1,
                options={"url": self.url},
            )
            return {self.type: {0: LeRobotVectorEnv(remote.make_env(section, n_envs))}}
