"""Running mean and standard deviation of what rollouts show, as named state of a policy: exact under every plan.

    rows of a block --sums--> float64 [1 + 2 D] --one fixed tree over blocks--> total --absorb--> mean, var, count

They change between iterations only, so that sampling and training of an iteration see the same numbers.  They are
buffers of the module: weights on the wire and checkpoints hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEAST_STD = 1e-4


class RunningStatistics(nn.Module):
    """Mean and variance of D columns over all rows absorbed so far; 0 and 1 before the first ones."""

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
        """Returns what `absorb` takes of rows [M, D], float64 [1 + 2 D]: it adds up over sets of rows.

        Deviations are taken from the mean so far, so that little is lost where a column is large and varies little.
        """
        deviations = rows.to(torch.float64) - self.mean
        number = torch.full((1,), float(len(rows)), dtype=torch.float64, device=rows.device)
        return torch.cat([number, deviations.sum(0), deviations.square().sum(0)])

    @torch.no_grad()
    def absorb(self, total: Tensor) -> None:
        """Takes the `sums` of all of an iteration's rows in (Chan, Golub and LeVeque 1979, equation 2.1)."""
        number, first, second = total[0], total[1 : 1 + self.size], total[1 + self.size :]
        if number == 0:
            return
        every = self.count + number
        shift = first / number  # from the old mean to that of the new rows
        spread = second / number - shift.square()  # the new rows' own variance
        self.var.copy_(
            (self.var * self.count + spread * number) / every + shift.square() * self.count * number / every**2
        )
        self.mean.add_(shift * number / every)
        self.count.copy_(every)

    def std(self) -> Tensor:
        """Returns the standard deviation [D], float32; columns that never change have 1."""
        std = self.var.sqrt().to(torch.float32)
        return torch.where(std < _LEAST_STD, torch.ones_like(std), std)

    def standardise(self, rows: Tensor, limit: float) -> Tensor:
        """Returns rows [..., D] less the mean, in deviations, clipped to [-limit, limit], float32."""
        return ((rows - self.mean.to(torch.float32)) / self.std()).clamp(-limit, limit)
