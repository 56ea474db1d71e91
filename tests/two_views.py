"""An env with two cameras of different sizes and two state vectors: move an arm's tip to a target in the plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.simulator import Measurement, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.randomness import uniform

SIZES = {"front": (16, 24), "wrist": (12, 12)}  # height and width
STEP, REACHED = 0.1, 0.2


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    return EpisodeEnv(config, Arm(config, num_envs), "move the tip to the target", render_final)


class Arm(Simulator):
    """N tips and targets in [-1, 1]^2."""

    action_dim = 2
    state_vectors = {"tip": 2, "target": 3}  # noqa: RUF012 - a constant
    image_sizes = SIZES

    def __init__(self, config: EnvConfig, num_rows: int) -> None:
        self.num_rows, self._cameras = num_rows, config.cameras
        self._tip, self._target = torch.zeros(num_rows, 2), torch.zeros(num_rows, 2)
        self.expert = lambda: ((self._target - self._tip) / STEP).clamp(-1.0, 1.0)

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        for row, seed in zip(rows, seeds, strict=True):
            drawn = torch.from_numpy(uniform(int(seed), "two views", 0, shape=(4,))) * 1.8 - 0.9
            self._tip[row], self._target[row] = drawn[:2], drawn[2:]

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        index = list(rows)
        self._tip[index] = (self._tip[index] + actions[index].clamp(-1.0, 1.0) * STEP).clamp(-1.0, 1.0)

    def measure(self, actions: Tensor) -> Measurement:
        distance = (self._target - self._tip).norm(dim=1, keepdim=True)
        return Measurement(
            reward=1.0 - distance[:, 0].tanh(),
            success=distance[:, 0] < REACHED,
            proprio=torch.cat([self._tip, self._target, distance], 1),
        )

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Tip in red and target in green: from the front in the whole plane, from the wrist around the tip."""
        index = list(rows)
        tip, target = self._tip[index], self._target[index]
        places = {"front": (tip, target), "wrist": (torch.zeros_like(tip), target - tip)}
        return {name: _drawn(*places[name], SIZES[name]) for name in self._cameras}

    def object_positions(self) -> Tensor:
        return torch.cat([self._target, torch.zeros(self.num_rows, 1)], 1)


def _drawn(tip: Tensor, target: Tensor, size: tuple[int, int]) -> Tensor:
    y, x = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
    cells = torch.stack([x, y], -1)
    image = torch.full((len(tip), *size, 3), 30, dtype=torch.uint8)
    for channel, place in enumerate((tip, target)):
        near = (cells - place[:, None, None]).norm(dim=-1) < 0.25
        image[..., channel] = torch.where(near, 230, image[..., channel])
    return image
