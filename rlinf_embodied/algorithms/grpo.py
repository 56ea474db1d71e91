"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300): episodes of a group are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import group_advantages
from rlinf_embodied.algorithms.batch import EnvColumns, Rollouts, TrainingBlock, concatenate, training_block
from rlinf_embodied.algorithms.on_policy import OnPolicy
from rlinf_embodied.config import OnPolicyConfig
from rlinf_embodied.runtime.host import StepContext


class GRPO(OnPolicy):
    """Trains on the (round, group) pairs that dynamic sampling has kept."""

    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        kept = _kept(step_context)
        return {block: grpo_block(parts, self.algorithm, block, kept) for block, parts in rollouts.items()}

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        return {"rollout/useful_groups": float(len(_kept(step_context)))} | super().update(step_context, data)


def _kept(step_context: StepContext) -> set[tuple[int, int]]:
    return set(cast("tuple[tuple[int, int], ...]", step_context.message))


def grpo_block(rollouts: Rollouts, algorithm: OnPolicyConfig, block: int, kept: set[tuple[int, int]]) -> TrainingBlock:
    """Returns a block's samples with group-relative advantages; groups that are not `kept` have no weight.

    Args:
        rollouts: one per round, each with one episode per row.
        algorithm: group size, success_only and length_normalized count here.
        block: its number, which numbers its groups.
        kept: (round, group) pairs to train on.
    """
    parts = [training_block(columns, env, *_group_columns(env, algorithm, block, kept)) for columns, env in rollouts]
    return concatenate(parts)


def _group_columns(
    env: EnvColumns, algorithm: OnPolicyConfig, block: int, kept: set[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Advantages and weights [H, B, C] of one round."""
    size = algorithm.group_size
    rewards = torch.where(env.valid, env.rewards, 0.0).sum((0, 2))
    episode = env.success.to(rewards) if algorithm.success_only else rewards
    relative = group_advantages(episode.reshape(-1, size)).reshape(-1)
    first = block * (len(episode) // size)  # group of the block
    counts = [(env.round, first + row // size) in kept for row in range(len(episode))]
    weights = env.valid.to(torch.float32) * env.rewards.new_tensor(counts, dtype=torch.float32)[None, :, None]
    if algorithm.length_normalized:
        weights = weights / env.valid.sum((0, 2)).clamp(min=1)[None, :, None]
    return relative[None, :, None].expand_as(weights).contiguous(), weights
