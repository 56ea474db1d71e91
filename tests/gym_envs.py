"""Gymnasium envs for tests, registered under "gym_envs:": a walk that ends in four ways, and a picture."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A place on a line, moved by the action; `ends` says what happens beyond 1."""

    metadata = {"render_modes": []}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, ends: str = "terminated", space: str = "box", low: float = -2.0) -> None:
        self.render_mode = None
        self.ends = ends
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = {
            "box": spaces.Box(low, 4.0, (1,), np.float32),
            "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "several": spaces.MultiDiscrete([2, 3]),
        }[space]
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = float(self.np_random.uniform(-0.1, 0.1))
        return np.array([self.place]), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.received.append(action)
        self.place += float(np.ravel(action)[0])
        beyond = self.place > 1
        place = np.nan if beyond and self.ends == "nan" else self.place
        info = {"is_success": beyond} if self.ends == "success" else {}
        return (
            np.array([place]),
            self.place,
            beyond and self.ends != "truncated",
            beyond and self.ends == "truncated",
            info,
        )


class Picture(gymnasium.Env):
    """Shows in which of three places a light is; pointing at it gives 1."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (6, 6, 3), np.uint8)
        self.action_space = spaces.Discrete(3)

    def _draw(self) -> np.ndarray:
        image = np.zeros((6, 6, 3), np.uint8)
        image[:, 2 * self.where : 2 * self.where + 2] = 255
        return image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.where = int(self.np_random.integers(3))
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right = float(action == self.where)
        self.where = int(self.np_random.integers(3))
        return self._draw(), right, False, False, {}

    def render(self) -> np.ndarray:
        return self._draw()


gymnasium.register("Walk-v0", Walk, max_episode_steps=3)
gymnasium.register("Picture-v0", Picture)
