"""Advantages (generalised per env step or chunk, group-relative) and their normalisation.

Axes: H chunk-steps, C actions per chunk, T = H * C env steps, B rows, K groups, G members of a group.
"""
# ruff: noqa: F722 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


def time_major(chunks: Shaped[Tensor, "H B C"]) -> Shaped[Tensor, "T B"]:
    """Returns a rollout's columns in the order of env steps, T = H * C."""
    return chunks.transpose(1, 2).reshape(-1, chunks.shape[1])


def chunk_major(steps: Shaped[Tensor, "T B"], chunk: int) -> Shaped[Tensor, "H B C"]:
    """Returns the inverse of `time_major` for chunks of `chunk` actions."""
    assert len(steps) % chunk == 0, f"{len(steps)} steps are not a multiple of the chunk length {chunk}"
    return steps.reshape(-1, chunk, steps.shape[1]).transpose(1, 2)


def next_values(
    values: Float[Tensor, "T B"],
    final_values: Float[Tensor, "T B"],
    last_values: Float[Tensor, " B"],
    truncated: Bool[Tensor, "T B"],
    valid: Bool[Tensor, "T B"],
) -> Float[Tensor, "T B"]:
    """Returns V_{t+1} for each valid step t, and 0 for the others.

    V_{t+1} is the value of the final observation if the episode was truncated, else V of the row's next valid step, or,
    at the end of the rollout, the value of the row's last observation.  Entries of terminated steps are arbitrary, and
    `gae` does not read them.
    """
    result = torch.zeros_like(values)
    following = last_values
    for t in range(len(values) - 1, -1, -1):
        value = torch.where(truncated[t], final_values[t], following)
        result[t] = torch.where(valid[t], value, result[t])
        following = torch.where(valid[t], values[t], following)
    return result


def gae(
    rewards: Float[Tensor, "T B"],
    values: Float[Tensor, "T B"],
    next_values: Float[Tensor, "T B"],
    terminated: Bool[Tensor, "T B"],
    truncated: Bool[Tensor, "T B"],
    valid: Bool[Tensor, "T B"],
    gamma: float | Float[Tensor, "T B"],
    lam: float | Float[Tensor, "T B"],
) -> tuple[Float[Tensor, "T B"], Float[Tensor, "T B"]]:
    """Returns (advantages, returns) of valid steps, and 0 for the others.

        delta_t = r_t + gamma V_{t+1} (1 - terminated_t) - V_t
        A_t     = delta_t + gamma lambda (1 - terminated_t) (1 - truncated_t) A_{t+1}
        return  = A_t + V_t

    (Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438.)
    t + 1 is the row's next valid step: invalid steps contribute neither reward nor decay.  V_{t+1} comes from
    `next_values`.  `terminated` means that the task ended the episode, `truncated` that the time limit did; in both
    cases the row's next step belongs to another episode.  gamma and lambda are per step; at
    chunk level they are one per step and row (`ChunkSteps.discount`, and lambda to the power of `ChunkSteps.length`).
    """
    bootstrap = torch.where(terminated, 0.0, next_values)
    deltas = rewards + gamma * bootstrap - values
    decay = gamma * lam * (~(terminated | truncated)).to(values.dtype)
    advantages = torch.zeros_like(values)
    following = values.new_zeros(values.shape[1])
    for t in range(len(values) - 1, -1, -1):
        following = torch.where(valid[t], deltas[t] + decay[t] * following, following)
        advantages[t] = torch.where(valid[t], following, advantages[t])
    returns = torch.where(valid, advantages + values, 0.0)
    return advantages, returns


@dataclass(frozen=True, slots=True)
class ChunkSteps:
    """A rollout with one step per chunk; every tensor is [H, B]."""

    rewards: Tensor  # float32, sum_c gamma^c r_c
    terminated: Tensor  # bool
    truncated: Tensor  # bool
    valid: Tensor  # bool
    length: Tensor  # int64, number c of executed env steps
    discount: Tensor  # float32, of the value after the chunk: gamma^C, or gamma^c where the episode ended after c steps


def chunk_steps(
    rewards: Float[Tensor, "H B C"],
    terminated: Bool[Tensor, "H B C"],
    truncated: Bool[Tensor, "H B C"],
    valid: Bool[Tensor, "H B C"],
    gamma: float,
) -> ChunkSteps:
    """Returns a rollout at chunk level; `gamma` is per env step, and invalid env steps take no time."""
    length = valid.sum(-1)
    table = torch.as_tensor(
        [gamma**c for c in range(rewards.shape[-1] + 1)], dtype=rewards.dtype, device=rewards.device
    )
    return ChunkSteps(
        rewards=(torch.where(valid, rewards, 0.0) * table[valid.cumsum(-1) - valid.to(torch.int64)]).sum(-1),
        terminated=(terminated & valid).any(-1),
        truncated=(truncated & valid).any(-1),
        valid=length > 0,
        length=length,
        discount=table[length],
    )


def group_advantages(returns: Float[Tensor, "K G"], scale_by_std: bool = True) -> Float[Tensor, "K G"]:
    """Returns (R - mean) / (std + 1e-6) within each group, or R - mean without scaling.

    Groups of one and groups of equal returns get exactly 0, since scaling would amplify the rounding of their mean.

    (Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1; std is that of a sample, with G - 1.  Unscaled: Liu et
    al., "Understanding R1-Zero-Like Training", arXiv 2503.20783.)
    """
    if returns.shape[1] < 2:
        return torch.zeros_like(returns)
    differs = nonzero_variance_groups(returns)[:, None]
    centred = torch.where(differs, returns - returns.mean(dim=1, keepdim=True), 0.0)
    return centred / (returns.std(dim=1, keepdim=True) + 1e-6) if scale_by_std else centred


def leave_one_out_advantages(returns: Float[Tensor, "K G"]) -> Float[Tensor, "K G"]:
    """Returns R minus the mean of the group's other members, G at least 2 (RLOO, arXiv 2402.14740)."""
    size = returns.shape[1]
    assert size >= 2
    return group_advantages(returns, scale_by_std=False) * (size / (size - 1))


def nonzero_variance_groups(raw_metric: Shaped[Tensor, "K G"]) -> Bool[Tensor, " K"]:
    """Returns which groups vary in the raw task metric; the others give no gradient (DAPO, arXiv 2503.14476, 3.2)."""
    return (raw_metric != raw_metric[:, :1]).any(dim=1)


def standardized(
    blocks: Mapping[int, tuple[Tensor, Tensor]],
    sum_blocks: Callable[[Mapping[int, Tensor]], Tensor],
    correction: int = 0,
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> dict[int, Tensor]:
    """Returns (A - mean) / (std + 1e-8) over all blocks; `correction` 0: population std, 1: sample std.

    `blocks` are (advantages, valid), of equal shape, of this worker's blocks.  `sum_blocks` sums over all workers in a
    fixed order (`Reducer.sum_blocks`), so that the bits are equal under every plan.  `sizes` splits the rows of each
    block into the same number of groups, each standardised over all blocks separately; None: one group.
    """
    cuts = {b: [len(a)] for b, (a, _) in blocks.items()} if sizes is None else sizes
    sums = lambda b, values: torch.stack([part.sum() for part in values.split(cuts[b])]).to(torch.float64)  # noqa: E731
    masked = {b: torch.where(valid, a, 0.0).to(torch.float64) for b, (a, valid) in blocks.items()}
    counts = {b: torch.stack([sums(b, valid), sums(b, masked[b])]) for b, (_, valid) in blocks.items()}
    count, total = sum_blocks(counts)
    number = count.clamp(min=1.0)

    def of_rows(b: int, groups: Tensor) -> Tensor:
        repeated = groups.repeat_interleave(torch.tensor(cuts[b], device=groups.device), output_size=sum(cuts[b]))
        return repeated.view(-1, *[1] * (blocks[b][0].ndim - 1))

    means = {b: of_rows(b, total / number) for b in blocks}
    squares = {b: sums(b, torch.where(v, masked[b] - means[b], 0.0).square()) for b, (_, v) in blocks.items()}
    std = (sum_blocks(squares) / (number - correction).clamp(min=1.0)).sqrt() + 1e-8
    return {b: (a - means[b].to(a.dtype)) / of_rows(b, std).to(a.dtype) for b, (a, _) in blocks.items()}
