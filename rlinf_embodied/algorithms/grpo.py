"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300): advantages compare a group's episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import group_advantages, leave_one_out_advantages, standardized
from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.algorithms.batch import Rollouts, TrainingBlock, concatenate, training_block
from rlinf_embodied.algorithms.clipped_objective import Estimator
from rlinf_embodied.algorithms.on_policy import OnPolicy, OnPolicyConfig
from rlinf_embodied.config import EnvConfig, TrainConfig
from rlinf_embodied.config.algorithm import Resampling
from rlinf_embodied.config.checks import require
from rlinf_embodied.runtime.host import StepContext


@dataclass(kw_only=True, slots=True)
class GRPOConfig(OnPolicyConfig):
    """Group-relative policy optimisation (arXiv:2402.03300): compares the episodes of a group, without a critic."""

    name = "grpo"

    def __post_init__(self) -> None:
        OnPolicyConfig.__post_init__(self)
        rule = "GRPO compares episodes of a group, so a group needs at least two"
        require(self.group_size >= 2, "algorithm.group_size", self.group_size, rule, "use 8")

    @property
    def needs_success(self) -> bool:
        return self.success_only

    @property
    def same_start(self) -> int:
        return self.group_size

    def resampling(self, env: EnvConfig) -> Resampling:
        drop = self.drop_zero_variance_groups
        return Resampling(env.num_envs // self.group_size, self.min_groups, drop, 1 + (self.max_resamples * drop))

    def check(self, config: TrainConfig) -> None:
        OnPolicyConfig.check(self, config)
        env, size = config.env, self.group_size
        divides, rule = env.block_size % size == 0, f"a group of algorithm.group_size={size} episodes stays in a block"
        require(divides, "env.block_size", env.block_size, rule, "make the block a multiple of the group")
        rule = "GRPO compares whole episodes, one per row"
        require(not env.auto_reset, "env.auto_reset", env.auto_reset, rule, "set env.auto_reset=false")
        enough, rule = self.min_groups <= env.num_envs // size, f"env.num_envs={env.num_envs} rows hold fewer groups"
        require(enough, "algorithm.min_groups", self.min_groups, rule, "use fewer groups or more envs")

    def make(self, training: Training) -> GRPO:
        return GRPO(training)


_centred = partial(group_advantages, scale_by_std=False)
_ADVANTAGES: dict[Estimator, Callable[[Tensor], Tensor]] = {
    Estimator.grpo: group_advantages,
    Estimator.dr_grpo: _centred,
    Estimator.rloo: leave_one_out_advantages,
    Estimator.reinforce_pp: _centred,
}


class GRPO(OnPolicy):
    """Trains on the (round, group) pairs that dynamic sampling kept."""

    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        kept = set(cast("tuple[tuple[int, int], ...]", step_context.message))
        samples = {block: grpo_block(parts, self.algorithm, block, kept) for block, parts in rollouts.items()}
        if self.algorithm.estimator is not Estimator.reinforce_pp:
            return samples
        advantages = {b: (t.advantages, t.valid) for b, t in samples.items()}
        scaled = standardized(advantages, self.training.reducer.sum_blocks)
        return {b: replace(t, advantages=scaled[b]) for b, t in samples.items()}

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        kept = set(cast("tuple[tuple[int, int], ...]", step_context.message))
        return {"rollout/useful_groups": float(len(kept))} | super().update(step_context, data)


def grpo_block(rollouts: Rollouts, algorithm: OnPolicyConfig, block: int, kept: set[tuple[int, int]]) -> TrainingBlock:
    """Returns a block's samples with group-relative advantages; (round, group) pairs that are not `kept` have weight 0.

    Rollouts, one per round, have one episode per row; the block's index determines the ids of its groups.
    """
    size, parts = algorithm.group_size, []
    for columns, env in rollouts:
        episode = env.success.to(torch.float32) if algorithm.success_only else env.returns
        relative = _ADVANTAGES[algorithm.estimator](episode.reshape(-1, size)).reshape(-1)
        first_group = block * (len(episode) // size)  # id of the block's first group
        counted = [(env.round, first_group + row // size) in kept for row in range(len(episode))]
        weights = env.valid.to(torch.float32) * env.rewards.new_tensor(counted, dtype=torch.float32)[None, :, None]
        if algorithm.length_normalized:
            weights = weights / env.valid.sum((0, 2)).clamp(min=1)[None, :, None]
        advantages = relative[None, :, None].expand_as(weights).contiguous()
        parts.append(training_block(columns, env, advantages, weights))
    return concatenate(parts)
