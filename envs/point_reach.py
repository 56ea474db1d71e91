"""A deterministic toy env: move a point to a goal.  All rows share a few tensors, as in a GPU simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.simulator import Measurement, Simulator
from rlinf_embodied.config import EnvConfig, EnvOptions
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.randomness import uniform

STEP = 0.15  # of the unit square's half side, at action 1
REACHED = 0.15  # distance at which the goal is reached
GAP = 0.2  # half the width of the gap in the wall
_CLEARANCE = 0.1  # minimum distance from the wall at the start and the goal
_POINT_RGB, _GOAL_RGB, _BACK_RGB, _WALL_RGB = (230, 40, 40), (40, 200, 60), (30, 30, 40), (200, 200, 200)


@dataclass(kw_only=True, slots=True)
class PointOptions(EnvOptions):
    """The options in env.options."""

    gap: float | None = None  # y of the gap in a wall at x = 0; episodes start left of the wall and end right of it

    def __post_init__(self) -> None:
        rule = "the wall goes from -1 to 1"
        require(self.gap is None or abs(self.gap) <= 1.0, "env.options.gap", self.gap, rule, "use 0.7, or leave it out")


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of the toy; arguments as envs.maniskill.make_env.

    Raises:
        ConfigError: an unknown option.
    """
    read_options(config)
    simulator = PointSimulator(config, num_envs, torch.device(device))
    return EpisodeEnv(config, simulator, config.instruction or "move the point to the goal", render_final)


def read_options(config: EnvConfig) -> PointOptions:
    """Returns env.options; raises ConfigError for unknown or invalid ones."""
    return typed(config.options, PointOptions, "env.options")


class PointSimulator(Simulator):
    """N points and N goals in the square [-1, 1]^2; actions are velocities [N, 2]."""

    backend = "point_reach"
    action_dim = 2

    def __init__(self, config: EnvConfig, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device
        self._config = config
        self._point = torch.zeros(num_rows, 2, device=device)
        self._goal = torch.zeros(num_rows, 2, device=device)
        self._gap: float | None = config.options.get("gap")

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Draws point and goal of each row from its seed alone."""
        drawn = torch.stack([torch.from_numpy(uniform(int(seed), "point_reach", 0, shape=(4,))) for seed in seeds])
        drawn = (drawn * 1.8 - 0.9).to(self.device)
        index = torch.as_tensor(list(rows), device=self.device)
        self._point[index], self._goal[index] = drawn[:, :2], drawn[:, 2:]
        if self._gap is not None:
            self._point[index, 0] = -drawn[:, 0].abs().clamp(min=_CLEARANCE)
            self._goal[index, 0] = drawn[:, 2].abs().clamp(min=_CLEARANCE)

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
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
        return Measurement(
            reward=torch.where(success, 1.0, 1 - torch.tanh(distance)),
            success=success,
            proprio=torch.cat([self._point, self._goal], 1),
            privileged=torch.cat([self._point, self._goal, offset], 1),
        )

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Draws point and goal; the second camera sees the mirror image of the first, and so on."""
        index = torch.as_tensor(list(rows), device=self.device)
        images = self._draw(index, self._config.obs_size)
        return {name: images if k % 2 == 0 else images.flip(2) for k, name in enumerate(self._config.cameras)}

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        drawn = self._draw(torch.as_tensor(list(rows), device=self.device), size).cpu()
        return dict(zip(rows, drawn, strict=True))

    def object_positions(self) -> Tensor | None:
        return torch.cat([self._point, torch.zeros_like(self._point[:, :1])], 1)

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

    def expert(self) -> Tensor:
        """Heads for the goal; left of the wall first for a point in front of the gap, then for one behind it."""
        target = self._goal
        if self._gap is not None:
            is_left, in_line = self._point[:, :1] < 0, (self._point[:, 1:] - self._gap).abs() < GAP / 2
            stops = self._point.new_tensor([[-_CLEARANCE, self._gap], [2 * _CLEARANCE, self._gap]])
            target = torch.where(is_left, torch.where(in_line, stops[1], stops[0]), self._goal)
        return ((target - self._point) / STEP).clamp(-1, 1)
