"""Epochs of minibatches over blocks: a minibatch is one slice of every block, its gradient one sum over all blocks.

    worker 0: blocks 0 1     worker 1: blocks 2 3          per minibatch:
       |  slice k of each       |  slice k of each         1. each worker: summed loss and gradient of its slices
       +------- Reducer --------+                          2. sums over all blocks, along one fixed tree
       |                        |                          3. divide by the summed weight, clip, step: the same
    same step                same step                        everywhere, so weights stay equal without a broadcast

Slices are cut from a permutation within the block, keyed by (seed, purpose, iteration, epoch, block), so that they do
not depend on who holds the block.  Losses are sums; means are formed here, from global counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlinf_embodied.learning.optimizer import FlatOptimizer
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.randomness import permutation


@dataclass(frozen=True, slots=True)
class LossSums:
    """What a slice adds: the loss to differentiate (a sum), the weight it counts with, and statistics to add up."""

    loss: Tensor  # scalar
    weight: Tensor  # scalar, the denominator of the loss
    statistics: Tensor  # [S], sums


Loss = Callable[[int, Tensor], Iterable[LossSums]]  # (block, row indices [R]) -> sums over parts of these rows


def slices(seed: int, purpose: str, iteration: int, epoch: int, block: int, size: int, parts: int) -> list[Tensor]:
    """Returns `parts` nearly equal slices of a permutation of a block's `size` samples, int64."""
    order = torch.from_numpy(permutation(seed, purpose, iteration, epoch, block, size=size))
    return [order[size * k // parts : size * (k + 1) // parts] for k in range(parts)]


def block_sums(parts: Iterable[LossSums], parameters: Sequence[nn.Parameter], num_statistics: int) -> Tensor:
    """Returns what a block adds to a minibatch, [D + 1 + S]: gradient of its summed loss, weight, statistics.

    Each part is differentiated before the next one is asked for, so that only one is in memory.
    """
    size = sum(p.numel() for p in parameters)
    total = torch.zeros(size + 1 + num_statistics, device=parameters[0].device)
    for part in parts:
        gradients = torch.autograd.grad(part.loss, list(parameters), allow_unused=True)
        flat = [
            (torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(parameters, gradients, strict=True)
        ]
        total += torch.cat([*flat, part.weight.detach().reshape(1), part.statistics.detach()])
    return total


def gradient_sums(
    rows: Mapping[int, Tensor], loss: Loss, parameters: Sequence[nn.Parameter], num_statistics: int, reducer: Reducer
) -> tuple[Tensor, float, Tensor]:
    """Returns (gradient of the summed loss [D], summed weight, summed statistics [S]) over the slices of all blocks."""
    per_block = {
        block: block_sums(loss(block, index) if len(index) else (), parameters, num_statistics)
        for block, index in rows.items()
    }
    return split_sums(reducer.sum_blocks(per_block), parameters)


def split_sums(total: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, float, Tensor]:
    """Returns (gradient [D], weight, statistics [S]) from sums of `block_sums` over blocks."""
    size = sum(p.numel() for p in parameters)
    return total[:size], float(total[size]), total[size + 1 :]


def minibatch_step(
    rows: Mapping[int, Tensor],
    loss: Loss,
    optimizer: FlatOptimizer,
    num_statistics: int,
    reducer: Reducer,
    veto: Callable[[Tensor, float], bool] | None = None,
) -> tuple[Tensor, float, float | None]:
    """Makes one optimizer step, unless `veto(statistics, weight)` or an empty minibatch forbids it.

    Returns:
        (statistics [S], weight, norm of the gradient before clipping; None where no step was made).
    """
    sums = gradient_sums(rows, loss, optimizer.parameters, num_statistics, reducer)
    return step_from(sums, optimizer, veto)


def step_from(
    sums: tuple[Tensor, float, Tensor],
    optimizer: FlatOptimizer,
    veto: Callable[[Tensor, float], bool] | None = None,
) -> tuple[Tensor, float, float | None]:
    """Makes one optimizer step from (gradient, weight, statistics); see `minibatch_step`."""
    gradient, weight, statistics = sums
    if weight == 0 or (veto is not None and veto(statistics, weight)):
        return statistics, weight, None
    return statistics, weight, optimizer.step(gradient / weight)
