"""What a block adds to a minibatch: the gradient of its summed loss, the weight it counts with, and statistics.

Losses are sums; means are formed by the learner, from global weights.  A block's part comes in passes, each of them
differentiated before the next one is asked for, so that the activations of only one are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf_embodied.telemetry.progress import report_progress


@dataclass(frozen=True, slots=True)
class LossSums:
    """What a pass adds: the loss to differentiate (a sum), the weight it counts with, and statistics to add up."""

    loss: Tensor  # scalar
    weight: Tensor  # scalar, the denominator of the loss
    statistics: Tensor  # [S], sums


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that is still to be made, with what it will add to the loss's denominator."""

    weight: float
    run: Callable[[], LossSums]
    trains: bool = True  # false: it is made for its weight and statistics, without a gradient


Passes = Callable[[int, Tensor], Sequence[Pass]]  # (block, row indices [R]) -> passes over parts of these rows
Differentiate = Callable[[Callable[[], LossSums], Sequence[nn.Parameter]], Tensor]  # see `differentiated`


def differentiated(run: Callable[[], LossSums], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Makes a pass and returns what it adds, [D + 1 + S]; a parameter that the loss does not reach has gradient 0."""
    with torch.enable_grad():
        part = run()
        gradients = torch.autograd.grad(part.loss, list(parameters), allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return torch.cat([*(part.reshape(-1) for part in parts), _counted(part)])


def block_sums(
    passes: Iterable[Pass],
    parameters: Sequence[nn.Parameter],
    num_statistics: int,
    differentiate: Differentiate = differentiated,
) -> Tensor:
    """Returns what a block adds to a minibatch, [D + 1 + S]: gradient of its summed loss, weight, statistics.

    Args:
        passes: over the block's rows.
        parameters: with D entries in all.
        num_statistics: S.
        differentiate: what makes a pass with its gradient.
    """
    size = sum(p.numel() for p in parameters)
    total = torch.zeros(size + 1 + num_statistics, device=parameters[0].device)
    for one in passes:
        if one.trains:
            total += differentiate(one.run, parameters)
        else:
            with torch.no_grad():
                total[size:] += _counted(one.run())
        report_progress()
    return total


def _counted(part: LossSums) -> Tensor:
    return torch.cat([part.weight.detach().reshape(1), part.statistics.detach()])


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Lets blocks forget their activations and compute them again in the backward pass."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
