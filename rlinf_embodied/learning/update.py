"""The update of an iteration: epochs of minibatches over blocks, with early stopping.

    worker 0: blocks 0 1     worker 1: blocks 2 3          per minibatch (learner.py):
       |  slice k of each       |  slice k of each         1. each worker: passes over its slices, summed gradients
       +------- Reducer --------+                          2. sums over all blocks, along one fixed tree
       |                        |                          3. divide by the summed weight, clip, step: the same
    same step                same step                        everywhere, so weights stay equal without a broadcast

A workflow defines how a block's rows become passes (features or tokens, loss terms), and the early stop.  Slices are
cut from a permutation within the block, keyed by (seed, purpose, iteration, epoch, block), so they do not depend on
the block's owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.learning.gradients import Passes
from rlinf_embodied.learning.learner import EarlyStop, Learner, Step
from rlinf_embodied.randomness import permutation

# what the passes of a policy add up, over everything that was sampled; a workflow may add to it
POLICY_STATISTICS = ("loss", "approx_kl", "clipped", "ratios", "entropy", "actions")
VALUE_STATISTICS = ("loss",)


Shuffle = tuple[int, str, int]  # seed, purpose and iteration, by which the order of rows is keyed


def cut(order: np.ndarray, num_minibatches: int) -> list[Tensor]:
    """Splits row indices into nearly equal slices, int64."""
    ends = [len(order) * k // num_minibatches for k in range(num_minibatches + 1)]
    return [torch.from_numpy(order)[a:b] for a, b in pairwise(ends)]


def minibatches(
    shuffle: Shuffle, sizes: Mapping[int, int], num_minibatches: int, epochs: int = 1
) -> Iterator[dict[int, Tensor]]:
    """Yields the row indices of each minibatch by block: one slice of every block, `num_minibatches` per epoch.

    Slices are cut from a permutation of the block's rows.
    """
    for epoch in range(epochs):
        orders = {block: permutation(*shuffle, epoch, block, size=size) for block, size in sizes.items()}
        slices = {block: cut(order, num_minibatches) for block, order in orders.items()}
        yield from ({block: pieces[k] for block, pieces in slices.items()} for k in range(num_minibatches))


@dataclass(slots=True)
class Fitted:
    """Sums over the steps of an update."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by the name of the statistic
    weight: float = 0.0
    norms: list[float] = field(default_factory=list)  # gradient norm before clipping of each step made
    stopped: bool = False  # whether an early stop ended the update

    def add(self, step: Step) -> None:
        for name, value in step.sums.items():
            self.sums[name] += value
        self.weight += step.weight
        self.norms += [] if step.norm is None else [step.norm]

    def mean(self, name: str, count: str | None = None) -> float:
        """Returns a statistic divided by another one, a count, or by the loss's denominator; 0 if empty."""
        return self.sums[name] / (max(self.weight, 1e-8) if count is None else max(self.sums[count], 1.0))

    @property
    def loss(self) -> float:
        return self.mean("loss")


def fit(
    learner: Learner,
    batches: Iterable[Mapping[int, Tensor]],
    passes: Passes,
    early_stop: EarlyStop | None = None,
    only: Collection[str] | None = None,
) -> Fitted:
    """Makes one step per minibatch, of all parameter groups or `only` some.

    A minibatch that stops the update early is not counted.
    """
    fitted = Fitted()
    for rows in batches:
        step = learner.step(rows, passes, early_stop, only)
        if step.stopped:
            fitted.stopped = True
            break
        fitted.add(step)
    return fitted


def policy_metrics(fitted: Fitted) -> dict[str, float]:
    """Returns the metrics of a policy update; each mean has a separate denominator."""
    return {
        "losses/policy_loss": fitted.loss,
        "losses/approx_kl": fitted.mean("approx_kl", "actions"),
        "losses/clipfrac": fitted.mean("clipped", "ratios"),
        "losses/entropy": fitted.mean("entropy", "actions"),
        "losses/grad_norm": sum(fitted.norms) / max(len(fitted.norms), 1),
    }
