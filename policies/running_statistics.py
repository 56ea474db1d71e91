"""Running mean and standard deviation of rollout data, kept in a policy's buffers: exact under every plan.

    rows of a block --sums--> float64 [1 + 2 D] --one fixed tree over blocks--> total --absorb--> mean, var, count

They change only between iterations, so that sampling and training of an iteration use the same values.  As buffers of
the module they are part of checkpoints and of weights sent to workers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MIN_STD = 1e-4


class RunningStatistics(nn.Module):
    """Mean and variance of D columns over all rows absorbed so far; initially 0 and 1."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def sums(self, rows: Tensor) -> Tensor:
        """Returns the input of `absorb` for rows [M, D], float64 [1 + 2 D], additive over sets of rows.

        Deviations are from the current mean, for precision in columns that are large and vary little.
        """
        deviations = rows.to(torch.float64) - self.mean
        number = torch.full((1,), float(len(rows)), dtype=torch.float64, device=rows.device)
        return torch.cat([number, deviations.sum(0), deviations.square().sum(0)])

    @torch.no_grad()
    def absorb(self, total: Tensor) -> None:
        """Updates the statistics by the `sums` of an iteration's rows (Chan, Golub and LeVeque 1979, equation 2.1)."""
        count, first, second = total[0], total[1 : 1 + self.size], total[1 + self.size :]
        if count == 0:
            return
        new_count = self.count + count
        shift = first / count  # from the old mean to the new rows' mean
        variance = second / count - shift.square()  # of the new rows
        self.var.copy_(
            (self.var * self.count + variance * count) / new_count + shift.square() * self.count * count / new_count**2
        )
        self.mean.add_(shift * count / new_count)
        self.count.copy_(new_count)

    def std(self) -> Tensor:
        """Returns the standard deviation [D], float32; 1 for constant columns."""
        std = self.var.sqrt().to(torch.float32)
        return torch.where(std < _MIN_STD, torch.ones_like(std), std)

    def standardise(self, rows: Tensor, limit: float) -> Tensor:
        """Returns rows [..., D] standardised and clipped to [-limit, limit], float32."""
        return ((rows - self.mean.to(torch.float32)) / self.std()).clamp(-limit, limit)
