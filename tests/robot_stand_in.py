"""A scripted robot: one joint at 50 Hz, which an emergency stop holds at the first command to move by more than 0.9."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.simulator import Measurement, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import SimulatorError

RATE_HZ = 50.0


class Arm(Simulator):
    """A row is an arm; it is solved where its joint reaches 1."""

    backend, action_dim, control_hz = "arm", 1, RATE_HZ

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self._joint, self._over_s, self._stopped = num_rows, torch.zeros(num_rows), 0.0, False

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        self._require_released()
        self._joint[list(rows)] = 0.0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._stopped |= bool((actions.abs() > 0.9).any())
        self._require_released()
        time.sleep(max(0.0, self._over_s - time.monotonic()))
        self._over_s = time.monotonic() + 1 / RATE_HZ
        self._joint[list(rows)] += actions[list(rows), 0] * 0.5

    def measure(self, actions: Tensor) -> Measurement:
        return Measurement(self._joint.clone(), self._joint >= 1.0, self._joint[:, None].clone())

    def _require_released(self) -> None:
        if self._stopped:
            raise SimulatorError("emergency stop: clear the workspace and release it")


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns the arms."""
    return EpisodeEnv(config, Arm(num_envs), "lift", render_final)
