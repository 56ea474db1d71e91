"""Training's own log-probs of what a rollout chose, at the weights that chose it, and how far the two are apart.

Calls have the rollout's size: a row's last bits depend on the size of its batch.  Axes as in batch.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import PolicyColumns, TrainingBlock
from rlinf_embodied.algorithms.log_probs import mask_at_level, to_level
from rlinf_embodied.algorithms.off_policy import Mismatch, mismatch
from rlinf_embodied.algorithms.rollout_samples import Rollouts
from rlinf_embodied.config import Level
from rlinf_embodied.interfaces.policies import Features, Record

Score = Callable[[Features, Record], Tensor]  # rows of one call -> training's log-probs, float32 [B, C, K]


@torch.no_grad()
def with_old_log_probs(score: Score, rollouts: Rollouts) -> Rollouts:
    """Adds training's log-probs of every choice to a block's rollouts, next to the recorded ones."""
    return [(replace(columns, old_log_probs=_scored(score, columns)), env) for columns, env in rollouts]


def _scored(score: Score, columns: PolicyColumns) -> Tensor:
    at = lambda part, h: {name: value[h] for name, value in part.items()}  # noqa: E731
    steps = range(len(columns.log_probs))
    return torch.stack([score(at(columns.features, h), at(columns.record, h)) for h in steps])


def mismatch_of_rollouts(rollouts: Rollouts) -> Mismatch:
    """Returns the difference between a block's two sets of log-probs, over all choices of valid actions."""
    parts = [(*_sides(columns), _made(env.valid, columns.mask, columns.log_probs.shape)) for columns, env in rollouts]
    return reduce(add, (mismatch(*part) for part in parts))


def capped(rollouts: Rollouts, level: Level, cap: float) -> Tensor:
    """Returns [importance weights that the cap cuts off, all of them] of a block, at a ratio's level, int64."""
    counts = torch.zeros(2, dtype=torch.int64)
    for columns, env in rollouts:
        old, recorded = (to_level(side, env.valid, level, columns.mask) for side in _sides(columns))
        kept = mask_at_level(env.valid, level, columns.log_probs.shape[-1], columns.mask)
        above = kept & (old - recorded > math.log(cap))
        counts += torch.stack([above.sum(), kept.sum()]).cpu()
    return counts


@torch.no_grad()
def mismatch_of_samples(score: Score, samples: TrainingBlock, index: Tensor, size: int) -> Mismatch:
    """Returns how far training's log-probs of some samples are from those that were recorded.

    Args:
        score: see Score.
        samples: a block's, of which nothing was scored again.
        index: int64 [R], which of them.
        size: rows in a call of the rollout.
    """
    parts = [_mismatch_of_call(score, samples, part, size) for part in index.split(size)]
    return reduce(add, parts)


def _mismatch_of_call(score: Score, samples: TrainingBlock, index: Tensor, size: int) -> Mismatch:
    if not len(index):
        nothing = torch.zeros(0)
        return mismatch(nothing, nothing, nothing > 0)
    rows = samples.rows(torch.cat([index, index[:1].expand(size - len(index))]))  # padded with copies of its first row
    now, kept = score(rows.features, rows.record), len(index)
    return mismatch(now[:kept], rows.old_log_probs[:kept], _made(rows.valid, rows.mask, now.shape)[:kept])


def _sides(columns: PolicyColumns) -> tuple[Tensor, Tensor]:
    assert columns.old_log_probs is not None, "they were scored again"
    return columns.old_log_probs, columns.log_probs


def _made(valid: Tensor, mask: Tensor | None, shape: torch.Size) -> Tensor:
    """Returns which choices were made in valid actions."""
    every = valid[..., None].expand(shape)
    return every if mask is None else every & mask
