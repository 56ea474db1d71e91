"""A custom env: gymnasium's Pusher on MuJoCo, an arm that pushes a puck to a place on the table.

docs/own_env.md explains it; own_env.yaml next to it is the section `env` of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np
import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.simulator import Measurement, Simulator
from rlinf_embodied.config import EnvConfig

SOLVED_M = 0.1  # from the puck to its goal
STRENGTH = 2.0  # of gymnasium's actions, where ours lie in [-1, 1]


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows; `env._target_` names this function."""
    return EpisodeEnv(config, Pusher(config.task, num_envs), "push the puck to the goal", render_final)


class Pusher(Simulator):
    """N rows, each a gymnasium env."""

    def __init__(self, task: str, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows = [gymnasium.make(task).unwrapped for _ in range(num_rows)]  # without its limit on steps
        self.action_dim = 7
        self._seen = np.stack([env.reset(seed=0)[0] for env in self._rows])  # [N, 23]
        self._reward = np.zeros(num_rows)

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in each of these rows; all of it follows from the seed."""
        for row, seed in zip(rows, seeds, strict=True):
            self._seen[row], _ = self._rows[row].reset(seed=int(seed))
            self._reward[row] = 0.0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one step of these rows."""
        for row in rows:
            action = actions[row].clamp(-1.0, 1.0).numpy() * STRENGTH
            self._seen[row], self._reward[row], *_ = self._rows[row].step(action)

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows; gymnasium's float64 becomes float32."""
        puck, goal = self._seen[:, 17:20], self._seen[:, 20:23]
        return Measurement(
            reward=torch.as_tensor(self._reward, dtype=torch.float32),
            success=torch.as_tensor(np.linalg.norm(puck - goal, axis=1) < SOLVED_M),
            proprio=torch.as_tensor(self._seen, dtype=torch.float32),
        )
