"""A custom policy loss: PPO's, and the KL divergence to the behaviour-cloned policy that the run began with.

algorithm.kl_coef adds an estimate whose gradient is that of KL(clone || pi).  This one's is that of KL(pi || clone).
docs/own_algorithm.md explains custom losses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlinf_embodied.algorithms.policy_losses import Clipped, PolicyEntries
from rlinf_embodied.config.checks import require_numbers


@dataclass(kw_only=True, slots=True)
class KLToClone(Clipped):
    """PPO's loss plus coef sg(r) (log pi - log clone)^2 / 2.

    The square is k2 of Schulman 2020 ("Approximating KL divergence"): averaged over samples of pi, its gradient is that
    of KL(pi || clone).  The ratio r corrects for samples of pi_old.
    """

    needs_reference = True
    regularizes = True

    coef: float = 0.1

    def __post_init__(self) -> None:
        require_numbers(self, "algorithm.loss", "coef")

    def __call__(self, entries: PolicyEntries) -> Tensor:
        assert entries.reference_log_probs is not None  # as it needs them
        apart = entries.log_probs - entries.reference_log_probs
        return Clipped.__call__(self, entries) + self.coef * entries.ratio.detach() * apart.square() / 2
