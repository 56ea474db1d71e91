"""Losses of soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), as sums over transitions.

Axes: E critics of an ensemble, M transitions.
"""

# ruff: noqa: F722 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn


def soft_target(
    rewards: Float[Tensor, " M"],
    terminated: Float[Tensor, " M"],
    next_values: Float[Tensor, "E M"],
    next_log_probs: Float[Tensor, " M"],
    entropy_coef: float | Tensor,
    gamma: float,
) -> Float[Tensor, " M"]:
    """Returns y = r + gamma (1 - d) (min_e Q_e(s', a') - alpha log pi(a' | s')), equation 5.

    Args:
        rewards: of the step.
        terminated: 1 where the task ended the episode, 0 where it continues or was truncated.
        next_values: of target critics, at an action of the policy.
        next_log_probs: of that action.
        entropy_coef: alpha; 0 leaves the entropy out.
        gamma: discount per step.
    """
    return rewards + gamma * (1 - terminated) * (next_values.amin(0) - entropy_coef * next_log_probs)


def critic_loss(values: Float[Tensor, "E M"], targets: Float[Tensor, " M"]) -> Float[Tensor, ""]:
    """Returns sum_e sum_m (Q_e - y)^2 / 2, equation 5."""
    return 0.5 * (values - targets).square().sum()


def policy_loss(
    values: Float[Tensor, "E M"], log_probs: Float[Tensor, " M"], entropy_coef: float | Tensor, pessimistic: bool = True
) -> Float[Tensor, ""]:
    """Returns sum_m (alpha log pi(a | s) - Q(s, a)), equation 7; Q is the minimum over all critics, or their mean."""
    best = values.amin(0) if pessimistic else values.mean(0)
    return (entropy_coef * log_probs - best).sum()


def entropy_coef_loss(
    log_coef: Float[Tensor, ""], log_probs: Float[Tensor, " M"], target_entropy: float
) -> Float[Tensor, ""]:
    """Returns -sum_m log(alpha) (log pi(a | s) + target entropy), of which only alpha has a gradient.

    Equation 18 has alpha in place of its logarithm; like the authors' code this is in the logarithm, so that alpha
    stays positive.
    """
    return -(log_coef * (log_probs.detach() + target_entropy)).sum()


@torch.no_grad()
def move_towards(targets: Iterable[nn.Parameter], sources: Iterable[nn.Parameter], tau: float) -> None:
    """Makes each target (1 - tau) target + tau source."""
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, tau)
