"""Action-level value heads: V before each of the C actions of a chunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Standardise(nn.Module):
    """Shifts and scales columns by statistics that are set once and then stay."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, limit: float = 10.0) -> None:
        """Takes the number of columns, and how many standard deviations a value may lie off before it is clipped.

        RL leaves the range of the demonstrations, and a frozen scale must not blow up there.
        """
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.limit = limit

    @torch.no_grad()
    def set(self, mean: Tensor, std: Tensor, floor: float = 0.01) -> None:
        """Takes the statistics [size]; a std below `floor` counts as `floor`, constant columns are not scaled."""
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std < 1e-6, torch.ones_like(std), std.clamp(min=floor)))

    def forward(self, x: Tensor) -> Tensor:
        """Standardises [..., size]."""
        return ((x - self.mean) / self.std).clamp(-self.limit, self.limit)


class ValueHead(nn.Module):
    """A tanh network with one output; its last layer starts at 0, so that an untrained critic says 0."""

    def __init__(self, in_features: int, hidden_size: int) -> None:
        super().__init__()
        last = nn.Linear(hidden_size, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_size), nn.Tanh(), nn.Linear(hidden_size, hidden_size), nn.Tanh(), last
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to values [...]."""
        return self.layers(x)[..., 0]
