"""point_reach that crashes or becomes slow, by env.options, counted in env steps since the object was made.

crash_at_step   raises SimulatorError in this step
slow_row_s      sleeps so many seconds for every row in every step ...
slow_from_step  ... from this step on, in all objects of this machine with the same number
number          that number
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.point_reach import PointSimulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import SimulatorError


class FaultySimulator(PointSimulator):
    _steps_run = 0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._steps_run += 1
        options = self._config.options
        if options.get("crash_at_step") == self._steps_run:
            raise SimulatorError(f"env.options.crash_at_step is {self._steps_run}: point_reach fails as configured")
        if "slow_from_step" in options:
            marker = Path(tempfile.gettempdir()) / f"slow_reach_{options['number']}"
            if self._steps_run >= options["slow_from_step"]:
                marker.touch()
            if marker.exists():
                time.sleep(options["slow_row_s"] * self.num_rows)
        super().step(actions, rows)


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    simulator = FaultySimulator(config, num_envs, torch.device(device))
    return EpisodeEnv(config, simulator, config.instruction or "move the point to the goal", render_final)
