"""A custom policy loss: Simple Policy Optimization (arXiv 2401.16025), a penalty in place of PPO's clip.

docs/own_algorithm.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlinf_embodied.algorithms.policy_losses import PolicyEntries
from rlinf_embodied.config import PolicyLoss
from rlinf_embodied.config.checks import require_numbers


@dataclass(kw_only=True, slots=True)
class SPO(PolicyLoss):
    """-(r A - |A| / (2 epsilon) (r - 1)^2), whose minimum over r is at 1 + epsilon or 1 - epsilon."""

    regularizes = False  # without an advantage it has no gradient

    epsilon: float = 0.2

    def __post_init__(self) -> None:
        require_numbers(self, "algorithm.loss", "epsilon", above=True)

    def __call__(self, entries: PolicyEntries) -> Tensor:
        ratio, advantages = entries.ratio, entries.advantages
        return advantages.abs() / (2 * self.epsilon) * (ratio - 1).square() - ratio * advantages
