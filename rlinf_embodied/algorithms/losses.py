"""Losses as sums over rows, with their counts, so that microbatches and blocks add up exactly.

Callers form means from counts over all blocks, computed before the backward pass.  Masked entries may be arbitrary,
even NaN: they affect neither the sum nor its gradient.  `*axes` are any; a mask,
weight or advantage may lack trailing axes of the ratio (a coarser credit level), never the reverse.
"""
# ruff: noqa: F722, UP037 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional

from rlinf_embodied.algorithms.policy_losses import Clipped, PolicyEntries
from rlinf_embodied.config import PolicyLoss, RatioLevel
from rlinf_embodied.errors import ObjectiveError

_CLIPPED = Clipped()
LARGEST_LOG_RATIO = 0.5  # limit of the histogram of log ratios
MAX_LOG_RATIO = 20.0  # log ratios are clipped to +-20: e^20 is half a billion, and nothing overflows


@dataclass(frozen=True, slots=True)
class PolicySums:
    """Sums of the policy's loss over rows; every tensor is a scalar."""

    loss: Tensor  # weighted sum; divide by `weight` over all blocks
    weight: Tensor  # sum of the weights
    approx_kl: Tensor  # sum over entries; divide by the number of their actions
    clipped: Tensor  # number of entries outside of the clip range
    count: Tensor  # number of entries


def policy_loss(
    log_probs: Float[Tensor, "*axes"],
    old_log_probs: Float[Tensor, "*axes"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "..."],
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "..."],
    importance: Float[Tensor, "*axes"] | None = None,
    *,
    loss: PolicyLoss = _CLIPPED,
    dual_clip: float | None = None,
    length: Shaped[Tensor, "*axes"] | None = None,
    reference: Float[Tensor, "*axes"] | None = None,
) -> PolicySums:
    """Returns sums of the policy's loss l of each entry.

        r = exp(clip(log pi - log pi_old, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        loss = sum w u l(r, A, ...)
        approx_kl = sum (r - 1) - log r         clipped = sum [r outside of the clip range]

    With `length`, the number of choices of an entry, r is a geometric mean: log pi - log pi_old is divided by `length`,
    except for approx_kl.

    Log-probs are at the ratio's level (`log_probs.to_level`), those of pi with a gradient.  Advantages A, the mask, and
    weights w (for example to give all trajectories the same weight) are at that level or a coarser one.  The importance
    u (`importance_weights`; None: 1) does not enter the sum of weights.

    Raises:
        ObjectiveError: the shape of the loss is not that of its entries.
    """
    mask, weights, advantages = (_aligned(coarse, log_probs) for coarse in (mask, weights, advantages))
    weights, advantages = torch.where(mask, weights, 0.0), torch.where(mask, advantages, 0.0)
    log_probs, old_log_probs = (torch.where(mask, x, 0.0) for x in (log_probs, old_log_probs))
    difference = log_probs - old_log_probs
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = (log_ratio if length is None else (difference / length).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    reference = None if reference is None else torch.where(mask, reference, 0.0)
    inputs = (log_probs, old_log_probs, ratio, advantages, clip_low, clip_high, dual_clip, reference)
    entries = loss(PolicyEntries(*inputs))
    if entries.shape != ratio.shape:
        raise ObjectiveError(
            f"algorithm.loss is {type(loss).__name__}, which returned a loss of shape {tuple(entries.shape)} for "
            f"entries of shape {tuple(ratio.shape)}: return one number per entry; weights and sums are applied to it"
        )
    with torch.no_grad():
        kl = (log_ratio.exp() - 1 - log_ratio).sum()
        clipped = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).sum()
    corrected = weights if importance is None else weights * importance
    return PolicySums((corrected * entries).sum(), weights.sum(), kl, clipped, mask.sum())


def _aligned(coarse: Tensor, fine: Tensor) -> Tensor:
    """Returns `coarse` repeated along the trailing axes of `fine` that it lacks."""
    shape = fine.shape
    assert coarse.shape == shape[: coarse.dim()], f"{tuple(coarse.shape)} is not a prefix of {tuple(shape)}"
    return coarse.reshape(*coarse.shape, *[1] * (len(shape) - coarse.dim())).expand(shape)


def reference_kl(
    log_probs: Float[Tensor, "*axes"], reference: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]
) -> Float[Tensor, "*axes"]:
    """Returns rho - 1 - log rho with rho = exp(reference - log_probs) for each entry, 0 where masked.

    log rho is clipped to +-MAX_LOG_RATIO.  A non-negative estimate of KL(pi || reference) from samples of pi (k3 of
    Schulman 2020, "Approximating KL divergence"; GRPO, arXiv 2402.03300, eq. 4).
    """
    log_ratio = torch.where(mask, reference - log_probs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


@torch.no_grad()
def importance_weights(
    training: Float[Tensor, "*axes"],
    rollout: Float[Tensor, "*axes"],
    mask: Bool[Tensor, "*axes"],
    cap: float,
    *,
    floor: float = 0.0,
    level: RatioLevel = RatioLevel.token,
    masks: bool = False,
) -> tuple[Float[Tensor, "*axes"], Bool[Tensor, "*axes"]]:
    """Returns weights that correct entries' losses for the sampling policy, and which ratios lie out of bounds.

        rho = exp(training - rollout) of an entry's log-probs; at the level sequence the product of these over the
              unmasked entries of the last axis, at the level geometric their geometric mean
        weight = min(max(rho, floor), cap); with `masks` rho within these bounds, and 0 outside

    Weights have no gradient, and are arbitrary where masked.  Truncated importance sampling (Ionides 2008, "Truncated
    Importance Sampling") bounds the variance at the price of a bias; per token with a cap of 2 by Yao et al. 2025
    ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").  Masks: IcePop per token (Ring-1T, arXiv
    2510.18855; floor 0.5, cap 5), and per sequence (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch").
    """
    log_ratio = torch.where(mask, training - rollout, 0.0)
    if level is not RatioLevel.token:
        log_ratio = log_ratio.sum(-1, keepdim=True).expand(mask.shape)
    if level is RatioLevel.geometric:
        log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    outside = (ratio < floor) | (ratio > cap)
    return (ratio.masked_fill(outside, 0.0) if masks else ratio.clamp(floor, cap)), outside


@torch.no_grad()
def mismatch(
    training: Float[Tensor, "*axes"], rollout: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]
) -> Float[Tensor, "4"]:
    """Returns the difference of two sets of log-probs of the same tokens, float64, over unmasked entries.

    [sum of |training - rollout|, largest of these, sum of k3, sum of rho], with rho = exp(training - rollout).

    k3 = rho - 1 - log rho of tokens drawn from pi_rollout is an unbiased, non-negative estimate of
    KL(rollout || training) (Schulman 2020, "Approximating KL divergence"); the mean of rho is 1 in expectation.
    """
    log_ratio = torch.where(mask, training - rollout, 0.0).to(torch.float64)
    distance, ratio = log_ratio.abs(), torch.where(mask, log_ratio.exp(), 0.0)
    return torch.stack([distance.sum(), distance.max(), (torch.expm1(log_ratio) - log_ratio).sum(), ratio.sum()])


def require_unit_ratio(max_abs_log_ratio: float, limit: float = 1e-5) -> None:
    """Checks that rollout and training agree before an iteration's first optimizer step.

    Raises:
        ObjectiveError: a log ratio differs from 0 by more than `limit`, or is NaN.
    """
    if not max_abs_log_ratio <= limit:
        raise ObjectiveError(
            f"the importance ratio before the first update is not 1: max |log ratio| is {max_abs_log_ratio:.3g}, but "
            f"the limit is {limit:g}; log-probs of rollout and training differ at unchanged weights: check "
            "temperature, cached features, dtype, dropout and the weights' version"
        )


def value_loss(
    values: Float[Tensor, "*axes"],
    returns: Float[Tensor, "*axes"],
    mask: Bool[Tensor, "*axes"],
    old_values: Float[Tensor, "*axes"] | None = None,
    *,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> Float[Tensor, ""]:
    """Returns sum h(V - R), or with `clip` sum max(h(V - R), h(V_old + clip(V - V_old, -clip, clip) - R)).

    h(x) is x^2 / 2, with `huber_delta` from |x| = delta on delta (|x| - delta / 2).  The maximum is that of PPO's
    authors' code ("The 37 implementation details of PPO", Huang et al. 2022, number 9).
    """

    def h(error: Tensor) -> Tensor:
        if huber_delta is None:
            return 0.5 * error.square()
        return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)

    # masked entries become 0 before anything is multiplied, so that their NaN cannot reach the gradient
    values, returns = torch.where(mask, values, 0.0), torch.where(mask, returns, 0.0)
    loss = h(values - returns)
    if clip is not None:
        assert old_values is not None
        before = torch.where(mask, old_values, 0.0)
        loss = torch.maximum(loss, h(before + (values - before).clamp(-clip, clip) - returns))
    return loss.sum()


def explained_variance(
    blocks: Mapping[int, tuple[Tensor, Tensor, Tensor]], sum_blocks: Callable[[Mapping[int, Tensor]], Tensor]
) -> float:
    """Returns 1 - Var(R - V) / Var(R) over all blocks; NaN if the returns do not vary.

    `blocks` are (values V, returns R, mask), of equal shape; `sum_blocks` is that of the Reducer.
    """
    sums = {}
    for block, (values, returns, mask) in blocks.items():
        targets = torch.where(mask, returns, 0.0).to(torch.float64)
        errors = targets - torch.where(mask, values, 0.0).to(torch.float64)
        parts = [targets.sum(), targets.square().sum(), errors.sum(), errors.square().sum()]
        sums[block] = torch.stack([mask.sum().to(torch.float64), *parts])
    count, target, target_sq, error, error_sq = sum_blocks(sums).tolist()
    if count == 0:
        return math.nan
    variance = target_sq / count - (target / count) ** 2
    residual = error_sq / count - (error / count) ** 2
    # below the rounding of float64 sums, "variance" is noise
    return 1 - residual / variance if variance > 1e-12 * max(1.0, target_sq / count) else math.nan
