"""How far training is from the distribution that was sampled from, and what corrects for it.

Two programs that compute the same model differ in last bits (or more: other kernels, lower precision, older weights),
so pi_training / pi_rollout is not 1 even before the first update.  rho = exp(training - rollout) throughout, where
`rollout` are the log-probs recorded when tokens or actions were sampled.
"""
# ruff: noqa: F722, UP037 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences of two sets of log-probs as sums over the tokens at hand, scalars; blocks add up exactly."""

    count: Tensor  # tokens
    abs_sum: Tensor  # sum of |training - rollout|
    abs_max: Tensor  # largest |training - rollout|; 0 without tokens
    kl_sum: Tensor  # sum of rho - 1 - log rho
    ratio_sum: Tensor  # sum of rho; its mean is 1 in expectation where both have the same support

    def metrics(self) -> dict[str, float]:
        """Returns means in nats per token; NaN without tokens."""
        count = float(self.count) or float("nan")
        return {
            "mismatch_mean": float(self.abs_sum) / count,
            "mismatch_max": float(self.abs_max),
            "mismatch_kl": float(self.kl_sum) / count,
            "mismatch_ratio": float(self.ratio_sum) / count,
        }

    def stacked(self) -> Float[Tensor, "5"]:
        """Returns the five sums in their order, float64 on the CPU."""
        every = (self.count, self.abs_sum, self.abs_max, self.kl_sum, self.ratio_sum)
        return torch.stack([value.to(torch.float64) for value in every]).cpu()

    @classmethod
    def of(cls, stacked: Float[Tensor, "5"]) -> Mismatch:
        """Returns what was stacked."""
        return cls(*stacked.unbind())

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.count + other.count,
            self.abs_sum + other.abs_sum,
            torch.maximum(self.abs_max, other.abs_max),
            self.kl_sum + other.kl_sum,
            self.ratio_sum + other.ratio_sum,
        )


@torch.no_grad()
def mismatch(
    training: Float[Tensor, "*axes"], rollout: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]
) -> Mismatch:
    """Returns the difference between log-probs of the same tokens; masked entries may hold anything.

    The KL estimate is k3 = rho - 1 - log rho of tokens drawn from pi_rollout: unbiased for KL(rollout || training),
    never negative (Schulman 2020, "Approximating KL divergence").  Sums run in float64.
    """
    log_ratio = torch.where(mask, training - rollout, 0.0).to(torch.float64)
    distance = log_ratio.abs()
    largest = distance.max() if distance.numel() else distance.new_zeros(())
    kl = (torch.expm1(log_ratio) - log_ratio).sum()
    ratio = torch.where(mask, log_ratio.exp(), 0.0).sum()
    return Mismatch(mask.sum(), distance.sum(), largest, kl, ratio)


@torch.no_grad()
def truncated_importance_weights(
    training: Float[Tensor, "*axes"],
    rollout: Float[Tensor, "*axes"],
    mask: Bool[Tensor, "*axes"],
    cap: float,
) -> Float[Tensor, "*axes"]:
    """Returns min(rho, cap) for each entry, without a gradient; 1 where the mask leaves an entry out.

    Truncated importance sampling (Ionides 2008, "Truncated Importance Sampling"): the cap bounds the variance at the
    price of a bias.  Multiplied with an entry's loss it corrects for the sampler (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", who cap at 2).
    """
    return torch.where(mask, training - rollout, 0.0).exp().clamp(max=cap)
