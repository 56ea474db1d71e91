"""Losses as sums over the rows at hand, with their counts: microbatches over blocks add up exactly.

A mean is formed by the caller from counts over all blocks, computed before the backward pass.  Entries that a mask
leaves out may hold anything, NaN included: they reach neither the sum nor its gradient.  `*axes` are any; a mask,
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

from rlinf_embodied.errors import ObjectiveError

Pair = tuple[Tensor, Tensor]  # numerator and denominator of a mean, both scalar


def masked_sum(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, ""]:
    """Returns the sum over the entries that the mask keeps."""
    return torch.where(mask, values, 0.0).sum()


def align(coarse: Shaped[Tensor, "..."], shape: torch.Size, name: str) -> Shaped[Tensor, "..."]:
    """Returns `coarse` broadcast to a finer level by repeating it along trailing axes.

    Raises:
        ObjectiveError: its axes are no leading part of `shape`, so it is finer than the ratio, or of other rows.
    """
    if coarse.shape != shape[: coarse.dim()]:
        raise ObjectiveError(
            f"{name} has shape {tuple(coarse.shape)}, but the importance ratio has {tuple(shape)}: rewards may be "
            "coarser than log-probs, not finer; use a finer algorithm.ratio_level"
        )
    return coarse.reshape(*coarse.shape, *[1] * (len(shape) - coarse.dim())).expand(shape)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Sums of the clipped objective over the rows at hand; every tensor is a scalar."""

    loss: Tensor  # weighted sum; divide by `weight` over all blocks
    weight: Tensor  # sum of the weights
    approx_kl: Pair
    clipfrac: Pair
    max_abs_log_ratio: Tensor  # 0 without entries


def policy_loss(
    log_probs: Float[Tensor, "*axes"],
    old_log_probs: Float[Tensor, "*axes"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "..."],
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "..."] | None = None,
    *,
    dual_clip: float | None = None,
    max_log_ratio: float = math.inf,
    importance: Float[Tensor, "*axes"] | None = None,
) -> PolicyLoss:
    """Returns the clipped policy objective.

        r = exp(clip(log pi - log pi_old, -max_log_ratio, max_log_ratio))
        loss = -sum w u min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        approx_kl = mean (r - 1) - log r        clipfrac = mean [r outside of the clip range]

    (PPO, arXiv 1707.06347, eq. 7; the two-sided range of DAPO, arXiv 2503.14476, eq. 10.)  With `dual_clip` the min is
    at least dual_clip A where A < 0 (Ye et al., arXiv 1912.09729, eq. 5): a likely action that sampling hardly knew
    would otherwise pull without bound.

    Args:
        log_probs: log pi at the ratio's level (`log_probs.to_level`), with gradient.
        old_log_probs: log pi_old when the actions were sampled.
        advantages: A, at the ratio's level or a coarser one.
        mask: which entries count, at the ratio's level or a coarser one.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.
        weights: w of each entry, for example so that each trajectory weighs the same; None: 1.
        dual_clip: largest r that counts where A < 0, above 1; None: any.
        max_log_ratio: largest |log r| that counts, so that no r overflows.
        importance: u, what corrects each entry for the sampler (`off_policy.truncated_importance_weights`) and adds
            nothing to the weights' sum; None: 1.

    Raises:
        ObjectiveError: advantages, mask or weights are finer than the ratio.
    """
    shape = log_probs.shape
    mask = align(mask, shape, "mask")
    kept_weights = mask.to(log_probs.dtype)
    if weights is not None:
        kept_weights = torch.where(mask, align(weights, shape, "weights"), 0.0)
    kept_advantages = torch.where(mask, align(advantages, shape, "advantages"), 0.0)
    difference = torch.where(mask, log_probs - old_log_probs, 0.0)
    log_ratio = difference.clamp(-max_log_ratio, max_log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * kept_advantages, clipped * kept_advantages)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * kept_advantages)
        surrogate = torch.where(kept_advantages < 0, bounded, surrogate)
    with torch.no_grad():
        count = mask.sum()
        kl = ((ratio - 1) - log_ratio).sum()
        outside = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).sum()
        largest = difference.abs().max() if difference.numel() else difference.sum()
    corrected = kept_weights if importance is None else kept_weights * importance
    loss = -(corrected * surrogate).sum()
    return PolicyLoss(loss, kept_weights.sum(), (kl, count), (outside, count), largest)


def reference_kl(
    log_probs: Float[Tensor, "*axes"],
    reference: Float[Tensor, "*axes"],
    mask: Bool[Tensor, "*axes"],
    max_log_ratio: float = math.inf,
) -> Float[Tensor, "*axes"]:
    """Returns rho - 1 - log rho with rho = exp(reference - log_probs) for each entry, 0 where the mask leaves it out.

    |log rho| counts up to `max_log_ratio`, so that no rho overflows.

    An estimate of KL(pi || reference) from samples of pi that is never negative (k3 of Schulman 2020, "Approximating KL
    divergence"; GRPO, arXiv 2402.03300, eq. 4).
    """
    log_ratio = torch.where(mask, reference - log_probs, 0.0).clamp(-max_log_ratio, max_log_ratio)
    return log_ratio.exp() - 1 - log_ratio


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


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Sums of the value objective over the rows at hand; both tensors are scalars."""

    loss: Tensor  # divide by `count` over all blocks
    count: Tensor


def value_loss(
    values: Float[Tensor, "*axes"],
    returns: Float[Tensor, "*axes"],
    mask: Bool[Tensor, "*axes"],
    old_values: Float[Tensor, "*axes"] | None = None,
    clip: float | None = None,
) -> ValueLoss:
    """Returns sum 1/2 (V - R)^2, or with `clip` sum 1/2 max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2).

    (The clipped form is that of PPO's first implementation, OpenAI baselines; `clip` is in units of return.)
    """
    # masked entries become 0 before anything is multiplied, so that their NaN cannot reach the gradient
    values, returns = torch.where(mask, values, 0.0), torch.where(mask, returns, 0.0)
    errors = (values - returns).square()
    if clip is not None:
        assert old_values is not None, "a clipped value loss needs the values before the update"
        old_values = torch.where(mask, old_values, 0.0)
        errors = torch.maximum(errors, (old_values + (values - old_values).clamp(-clip, clip) - returns).square())
    return ValueLoss(0.5 * errors.sum(), mask.sum())


def explained_variance(
    blocks: Mapping[int, tuple[Tensor, Tensor, Tensor]], sum_blocks: Callable[[Mapping[int, Tensor]], Tensor]
) -> float:
    """Returns 1 - Var(R - V) / Var(R) over all blocks; NaN where the returns do not vary.

    Args:
        blocks: values V, returns R and which entries count, of each block of this worker, of one shape.
        sum_blocks: adds up what each block gives over all workers (`Reducer.sum_blocks`).
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
