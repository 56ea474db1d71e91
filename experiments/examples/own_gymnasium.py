"""A custom Gymnasium env that returns images: catch the ball that falls.

docs/gymnasium.md explains it; own_gymnasium.yaml next to it is the section `env` of a run.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ROWS, COLUMNS = 10, 5


class Catch(gymnasium.Env):
    """A ball falls from the top row; the paddle in the last one moves left, stays, or moves right."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        """Declares what is seen and what can be done."""
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (ROWS, COLUMNS, 3), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts with the ball in any column; all of the episode follows from the seed."""
        super().reset(seed=seed)
        self.height, self.ball, self.paddle = 0, int(self.np_random.integers(COLUMNS)), COLUMNS // 2
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves paddle and ball; the episode ends when the ball is down, with 1 if it was caught and -1 if not."""
        self.paddle = min(max(self.paddle + int(action) - 1, 0), COLUMNS - 1)
        self.height += 1
        down, caught = self.height == ROWS - 1, self.ball == self.paddle
        reward = (1.0 if caught else -1.0) if down else 0.0
        return self.render(), reward, down, False, {"is_success": down and caught}

    def render(self) -> np.ndarray:
        """Draws the ball in red and the paddle in white."""
        image = np.zeros((ROWS, COLUMNS, 3), np.uint8)
        image[ROWS - 1, self.paddle] = 255
        image[self.height, self.ball] = (255, 60, 60)
        return image


gymnasium.register("Catch-v0", f"{__name__}:Catch")
