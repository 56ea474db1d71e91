"""Losses of implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169), as sums over M transitions."""
# ruff: noqa: F722 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def expectile_loss(advantages: Float[Tensor, " M"], expectile: float) -> Float[Tensor, ""]:
    """Returns sum_m |tau - 1(u < 0)| u^2 of u = Q - V, equation 5: at its least V is the expectile tau of Q."""
    weights = torch.where(advantages < 0, 1 - expectile, expectile)
    return (weights * advantages.square()).sum()


def advantage_weights(advantages: Float[Tensor, " M"], scale: float, limit: float) -> Float[Tensor, " M"]:
    """Returns min(exp(scale (Q - V)), limit), with which equation 7 weighs the log-probs of recorded actions."""
    return (scale * advantages).exp().clamp(max=limit)
