"""point_reach that waits in the middle of training until a file is there: for runs that are interrupted just then."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.point_reach import PointSimulator
from rlinf_embodied.config import EnvConfig

OPEN_STEPS = 16  # env steps that an object runs before it waits: those of one rollout of `runs.tiny`
_POLL_S = 0.02


class GatedSimulator(PointSimulator):
    """Waits in its steps from the seventeenth on for the file that RLINF_TEST_GATE names; without it, for nothing."""

    _steps_run = 0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Moves the points of these rows, once it may."""
        gate = os.environ.get("RLINF_TEST_GATE")
        if gate and self._steps_run == OPEN_STEPS:
            print("waiting at the gate", flush=True)
        while gate and self._steps_run >= OPEN_STEPS and not Path(gate).exists():
            time.sleep(_POLL_S)
        self._steps_run += 1
        super().step(actions, rows)


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows; arguments as envs.point_reach.make_env."""
    simulator = GatedSimulator(config, num_envs, torch.device(device))
    return EpisodeEnv(config, simulator, config.instruction or "move the point to the goal", render_final)
