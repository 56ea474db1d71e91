"""How far training is from the distribution that was sampled from, and what corrects for it.

Two programs that compute the same model differ in last bits (or more: other kernels, lower precision, older weights),
so pi_training / pi_rollout is not 1 even before the first update.  rho = exp(training - rollout) throughout, where
`rollout` are the log-probs recorded when tokens or actions were sampled.

For rollouts training's log-probs are those of the weights that sampled, by calls of a block's size (a row's last bits
depend on the size of its batch).  Axes as in batch.py.
"""
# ruff: noqa: F722, UP037 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlinf_embodied.algorithms.batch import PolicyColumns, Rollouts, TrainingBlock
from rlinf_embodied.algorithms.log_probs import mask_at_level, to_level
from rlinf_embodied.config import Level
from rlinf_embodied.interfaces.policies import Features, Record

Score = Callable[[Features, Record], Tensor]  # rows of one call -> training's log-probs, float32 [B, C, K]


@torch.no_grad()
def mismatch(
    training: Float[Tensor, "*axes"], rollout: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]
) -> Float[Tensor, "5"]:
    """Returns how two sets of log-probs of the same tokens differ, float64: sums over the entries that the mask keeps.

    [number, sum of |training - rollout|, largest of these (0 without entries), sum of k3, sum of rho]

    k3 = rho - 1 - log rho of tokens drawn from pi_rollout is an estimate of KL(rollout || training), unbiased and never
    negative (Schulman 2020, "Approximating KL divergence"); the mean of rho is 1 in expectation.
    """
    log_ratio = torch.where(mask, training - rollout, 0.0).to(torch.float64)
    distance = log_ratio.abs()
    largest = distance.max() if distance.numel() else distance.new_zeros(())
    kl = (torch.expm1(log_ratio) - log_ratio).sum()
    ratio = torch.where(mask, log_ratio.exp(), 0.0).sum()
    return torch.stack([mask.sum().to(torch.float64), distance.sum(), largest, kl, ratio])


def joined(parts: Iterable[Float[Tensor, "5"]]) -> Float[Tensor, "5"]:
    """Returns the mismatch of all that several were measured on."""
    stacked = torch.stack(list(parts)).cpu()
    total = stacked.sum(0)
    total[2] = stacked[:, 2].max()
    return total


def mismatch_metrics(found: Float[Tensor, "5"]) -> dict[str, float]:
    """Returns means in nats per token; NaN without tokens."""
    count, distance, largest, kl, ratio = found.tolist()
    mean = lambda value: value / count if count else math.nan  # noqa: E731
    return {
        "losses/mismatch_mean": mean(distance),
        "losses/mismatch_max": largest,
        "losses/mismatch_kl": mean(kl),
        "losses/mismatch_ratio": mean(ratio),
    }


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


# -------------------------------------------------------------------------------------------------------- of rollouts
@torch.no_grad()
def with_old_log_probs(score: Score, rollouts: Rollouts) -> Rollouts:
    """Adds training's log-probs of every choice to a block's rollouts, next to the recorded ones."""
    return [(replace(columns, old_log_probs=_scored(score, columns)), env) for columns, env in rollouts]


def _scored(score: Score, columns: PolicyColumns) -> Tensor:
    at = lambda part, h: {name: value[h] for name, value in part.items()}  # noqa: E731
    steps = range(len(columns.log_probs))
    return torch.stack([score(at(columns.features, h), at(columns.record, h)) for h in steps])


def mismatch_of_rollouts(rollouts: Rollouts) -> Tensor:
    """Returns the mismatch of a block's two sets of log-probs, over all choices of valid actions."""
    masks = (mask_at_level(env.valid, Level.token, c.log_probs.shape[-1]) for c, env in rollouts)
    return joined(mismatch(*_sides(c), mask) for (c, _), mask in zip(rollouts, masks, strict=True))


def capped(rollouts: Rollouts, level: Level, cap: float) -> Tensor:
    """Returns [importance weights that the cap cuts off, all of them] of a block, at a ratio's level, int64."""
    counts = torch.zeros(2, dtype=torch.int64)
    for columns, env in rollouts:
        old, recorded = (to_level(side, env.valid, level) for side in _sides(columns))
        kept = mask_at_level(env.valid, level, columns.log_probs.shape[-1])
        above = kept & (old - recorded > math.log(cap))
        counts += torch.stack([above.sum(), kept.sum()]).cpu()
    return counts


@torch.no_grad()
def mismatch_of_samples(score: Score, samples: TrainingBlock, index: Tensor, size: int) -> Tensor:
    """Returns the mismatch of training's log-probs of some samples, int64 [R], and those that were recorded.

    Calls of `score` have `size` rows: a row's last bits depend on the size of its batch.
    """
    return joined(_mismatch_of_call(score, samples, part, size) for part in index.split(size))


def _mismatch_of_call(score: Score, samples: TrainingBlock, index: Tensor, size: int) -> Tensor:
    if not len(index):
        return torch.zeros(5, dtype=torch.float64)
    rows = samples.rows(torch.cat([index, index[:1].expand(size - len(index))]))  # padded with copies of its first row
    now, kept = score(rows.features, rows.record), len(index)
    mask = mask_at_level(rows.valid, Level.token, now.shape[-1])
    return mismatch(now[:kept], rows.old_log_probs[:kept], mask[:kept])


def _sides(columns: PolicyColumns) -> tuple[Tensor, Tensor]:
    assert columns.old_log_probs is not None, "they were scored again"
    return columns.old_log_probs, columns.log_probs
