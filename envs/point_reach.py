"""A deterministic toy behind the `VectorEnv` protocol: move a point to a goal; fast, and able to fail on demand.

All rows live in a few tensors, like a GPU simulator's.  With `config.options` there is a wall between point and goal:

    gap             where the way through the wall at x = 0 is, as y in [-1, 1]; episodes begin left of it and end right

Others inject faults, counted in env steps since the object was made; all are off by default:

    crash_at_step   raises SimulatorError in this step
    exit_at_step    ends the process in this step, without a trace
    hang_at_step    sleeps for an hour in this step
    slow_s          sleeps so many seconds in every step
    slow_row_s      sleeps so many seconds for every row in every step
    slow_from_step  is slow from this step on only
    once            a number; with it a fault happens only once per machine and number, so that a repetition succeeds;
                    what has become slow by then stays slow, also in objects made later
"""

from __future__ import annotations

import difflib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.simulator import Measurement
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.options import numbers
from rlinf_embodied.randomness import uniform

STEP = 0.15  # of the unit square's half side, at action 1
REACHED = 0.15  # distance at which the goal is reached
FAULTS = ("crash_at_step", "exit_at_step", "hang_at_step")
OPTIONS = ("gap", *FAULTS, "slow_s", "slow_row_s", "slow_from_step", "once")
GAP = 0.2  # half the width of the way through the wall
_BESIDE = 0.1  # least distance from the wall at the start and the goal
_HANG_S = 3600.0
_EXIT_CODE = 13
_POINT_RGB, _GOAL_RGB, _BACK_RGB, _WALL_RGB = (230, 40, 40), (40, 200, 60), (30, 30, 40), (200, 200, 200)


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of the toy; arguments as envs.maniskill.make_env.

    Raises:
        ConfigError: an unknown option.
    """
    read_options(config)
    simulator = PointSimulator(config, num_envs, torch.device(device))
    return EpisodeEnv(config, simulator, config.instruction or "move the point to the goal", render_final)


def read_options(config: EnvConfig) -> dict[str, float]:
    """Returns env.options.

    Raises:
        ConfigError: an unknown one, or no number.
    """
    options = numbers(config.options, "env.options")
    for name in options:
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            meant = f"did you mean {close[0]}?" if close else f"use one of {', '.join(OPTIONS)}"
            raise ConfigError(f"env.options.{name} is not known to point_reach: {meant}")
    if abs(gap := options.get("gap", 0.0)) > 1.0:
        raise ConfigError(f"env.options.gap is {gap}, but the wall goes from -1 to 1: use 0.7, or leave it out")
    return options


class PointSimulator:
    """N points and N goals in the square [-1, 1]^2; actions are velocities [N, 2]."""

    backend = "point_reach"
    action_dim = 2

    def __init__(self, config: EnvConfig, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device
        self._config = config
        self._point = torch.zeros(num_rows, 2, device=device)
        self._goal = torch.zeros(num_rows, 2, device=device)
        self._gap: float | None = config.options.get("gap")
        self._steps_run = 0
        self.expert = self._expert

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Draws point and goal of each row from its seed alone."""
        drawn = torch.stack([torch.from_numpy(uniform(int(seed), "point_reach", 0, shape=(4,))) for seed in seeds])
        drawn = (drawn * 1.8 - 0.9).to(self.device)
        index = torch.as_tensor(list(rows), device=self.device)
        self._point[index], self._goal[index] = drawn[:, :2], drawn[:, 2:]
        if self._gap is not None:
            self._point[index, 0] = -drawn[:, 0].abs().clamp(min=_BESIDE)
            self._goal[index, 0] = drawn[:, 2].abs().clamp(min=_BESIDE)

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Moves the points of these rows."""
        self._steps_run += 1
        self._inject_faults()
        index = torch.as_tensor(list(rows), device=self.device)
        before = self._point[index]
        self._point[index] = (before + actions[index].clamp(-1, 1) * STEP).clamp(-1, 1)
        if self._gap is not None:
            stopped = self._is_stopped(before, self._point[index])
            self._point[index, 0] = torch.where(stopped, before, self._point[index])[:, 0]

    def _is_stopped(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns which of R points would have gone through the wall, bool [R, 1]."""
        assert self._gap is not None
        crosses = (before[:, 0] < 0) != (after[:, 0] < 0)
        share = before[:, 0] / (before[:, 0] - after[:, 0]).where(crosses, before.new_ones(()))
        y = before[:, 1] + share * (after[:, 1] - before[:, 1])
        return (crosses & ((y - self._gap).abs() > GAP))[:, None]

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows; the reward is 1 at the goal and falls with the distance."""
        offset = self._goal - self._point
        distance = offset.norm(dim=1)
        success = distance < REACHED
        shown = self._goal if self._config.goal_in_proprio else torch.zeros_like(self._goal)
        return Measurement(
            reward=torch.where(success, 1.0, 1 - torch.tanh(distance)),
            success=success,
            fail=torch.zeros_like(success),
            proprio=torch.cat([self._point, shown], 1),
            privileged=torch.cat([self._point, self._goal, offset], 1),
        )

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Draws point and goal; the second camera sees the mirror image of the first, and so on."""
        index = torch.as_tensor(list(rows), device=self.device)
        seen = self._draw(index, self._config.obs_size)
        return {name: seen if k % 2 == 0 else seen.flip(2) for k, name in enumerate(self._config.cameras)}

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Draws single rows at another size."""
        drawn = self._draw(torch.as_tensor(list(rows), device=self.device), size).cpu()
        return dict(zip(rows, drawn, strict=True))

    def object_positions(self) -> Tensor | None:
        """Returns where the points are, in the plane z = 0."""
        return torch.cat([self._point, torch.zeros_like(self._point[:, :1])], 1)

    def states(self) -> dict[str, Tensor]:
        """Returns where points and goals are."""
        return {"actors/point": self._point.clone(), "actors/goal": self._goal.clone()}

    def close(self) -> None:
        """Frees nothing."""

    def _draw(self, index: Tensor, size: int) -> Tensor:
        """Returns uint8 [R, size, size, 3]: discs on a dark ground, y upwards."""
        across = (torch.arange(size, device=self.device) + 0.5) / size * 2 - 1
        y, x = torch.meshgrid(-across, across, indexing="ij")
        image = torch.tensor(_BACK_RGB, dtype=torch.uint8, device=self.device).repeat(len(index), size, size, 1)
        if self._gap is not None:
            wall = (x.abs() < 1.5 / size) & ((y - self._gap).abs() > GAP)
            image[:, wall] = torch.tensor(_WALL_RGB, dtype=torch.uint8, device=self.device)
        for centre, colour in ((self._goal[index], _GOAL_RGB), (self._point[index], _POINT_RGB)):
            inside = (x - centre[:, 0, None, None]) ** 2 + (y - centre[:, 1, None, None]) ** 2 < REACHED**2
            image[inside] = torch.tensor(colour, dtype=torch.uint8, device=self.device)
        return image

    def _expert(self) -> Tensor:
        return ((self._next() - self._point) / STEP).clamp(-1, 1)

    def _next(self) -> Tensor:
        """Returns where the expert goes: to the goal; first in front of the gap, then through it, where that is."""
        if self._gap is None:
            return self._goal
        left, near = self._point[:, :1] < 0, (self._point[:, 1:] - self._gap).abs() < GAP / 2
        stops = self._point.new_tensor([[-_BESIDE, self._gap], [2 * _BESIDE, self._gap]])
        return torch.where(left, torch.where(near, stops[1], stops[0]), self._goal)

    # ---------------------------------------------------------------------------------------------------------- faults
    def _inject_faults(self) -> None:
        options = self._config.options
        pause_s = options.get("slow_s", 0) + options.get("slow_row_s", 0) * self.num_rows
        if pause_s > 0 and self._is_slow():
            time.sleep(pause_s)
        for fault in FAULTS:
            if options.get(fault) == self._steps_run and self._may_fail(fault):
                _fail(fault, self._steps_run)

    def _is_slow(self) -> bool:
        """Whether the simulator is slow by now; with `once`, a marker file says so to those that are made later."""
        first = self._config.options.get("slow_from_step", 0)
        if "once" not in self._config.options or not first:
            return self._steps_run >= first
        if self._steps_run >= first:
            self._marker("slow").touch()
        return self._steps_run >= first or self._marker("slow").exists()

    def _marker(self, what: str) -> Path:
        return Path(tempfile.gettempdir()) / f"point_reach_{what}_{int(self._config.options['once'])}"

    def _may_fail(self, fault: str) -> bool:
        """Whether the fault may still happen; with `once`, the first process to create the marker file takes it."""
        if "once" not in self._config.options:
            return True
        try:
            self._marker(fault).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _fail(fault: str, step: int) -> None:
    if fault == "exit_at_step":
        os._exit(_EXIT_CODE)
    if fault == "hang_at_step":
        time.sleep(_HANG_S)
    raise SimulatorError(f"env.options.{fault} is {step}: point_reach fails as it was told to")
