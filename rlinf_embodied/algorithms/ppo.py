"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): advantages by GAE with a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import (
    chunk_major,
    chunk_steps,
    gae,
    next_values,
    spread_final_values,
    standardized,
    time_major,
)
from rlinf_embodied.algorithms.batch import (
    EnvColumns,
    PolicyColumns,
    Rollouts,
    TrainingBlock,
    concatenate,
    training_block,
)
from rlinf_embodied.algorithms.on_policy import OnPolicy
from rlinf_embodied.config import Critic, Level, OnPolicyConfig
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Features, Policy
from rlinf_embodied.runtime.host import StepContext


class PPO(OnPolicy):
    """Fits the critic on fixed targets first, then the policy."""

    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        """Returns samples whose advantages have mean 0 and standard deviation 1 over all blocks of all workers."""
        critic = self.training.settings.critic
        raw = {block: ppo_block(self.policy, parts, self.algorithm, critic) for block, parts in rollouts.items()}
        made = {b: (t.advantages, t.valid) for b, t in raw.items()}
        advantages = standardized(made, self.training.reducer.sum_blocks)
        return {b: replace(t, advantages=advantages[b]) for b, t in raw.items()}


@torch.no_grad()
def ppo_block(
    policy: Policy, rollouts: Rollouts, algorithm: OnPolicyConfig, critic: Critic = Critic.privileged
) -> TrainingBlock:
    """Returns a block's samples with GAE advantages per env step (not yet normalised) and the critic's targets."""
    return concatenate([_ppo_rollout(policy, columns, env, algorithm, critic) for columns, env in rollouts])


def _ppo_rollout(
    policy: Policy, columns: PolicyColumns, env: EnvColumns, algorithm: OnPolicyConfig, critic: Critic
) -> TrainingBlock:
    values = _values_of_rollout(policy, columns, env)
    h, b, chunk = values.shape
    final = torch.zeros_like(values)
    if algorithm.bootstrap_at_timeout and env.final is not None:
        final = spread_final_values(env.final_index, _first_value(policy, env.final, chunk, critic), (h, b, chunk))
    # without bootstrapping a time-out ends the episode like the task's own end: the critic sees the time
    truncated = env.truncated if algorithm.bootstrap_at_timeout else torch.zeros_like(env.truncated)
    terminated = env.terminated if algorithm.bootstrap_at_timeout else env.terminated | env.truncated
    steps, valid = time_major(values), time_major(env.valid)
    last = _first_value(policy, env.last, chunk, critic)
    following = next_values(steps, time_major(final), last, time_major(truncated), valid)
    advantages, returns = gae(
        time_major(env.rewards),
        steps,
        following,
        time_major(terminated),
        time_major(truncated),
        valid,
        algorithm.gamma if env.discounts is None else time_major(env.discounts),
        algorithm.gae_lambda,
    )
    advantages = chunk_major(advantages, chunk)
    if algorithm.ratio_level is Level.chunk and env.discounts is None:  # steps that stand for several are whole
        advantages = _chunk_advantages(env, values, following, terminated, truncated, algorithm)
    return training_block(columns, env, advantages, env.valid.to(torch.float32), values, chunk_major(returns, chunk))


def _chunk_advantages(
    env: EnvColumns,
    values: Tensor,
    following: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    algorithm: OnPolicyConfig,
) -> Tensor:
    """GAE with a whole chunk as one step, repeated for each of its actions, [H, B, C].

    The value after a chunk is that after its last valid action, which `following` [T, B] holds already.
    """
    steps = chunk_steps(env.rewards, terminated, truncated, env.valid, algorithm.gamma)
    last = env.valid.sum(-1, keepdim=True).clamp(min=1) - 1
    after = chunk_major(following, values.shape[2]).gather(2, last)[..., 0]
    flags = (steps.terminated, steps.truncated, steps.valid)
    advantages, _ = gae(steps.rewards, values[:, :, 0], after, *flags, steps.discount, algorithm.gae_lambda)
    return advantages[..., None].expand_as(values).contiguous()


def _values_of_rollout(policy: Policy, columns: PolicyColumns, env: EnvColumns) -> Tensor:
    """V before each action of the rollout, [H, B, C]: as acting gave it, or chunk-step by chunk-step likewise."""
    if columns.values is not None:
        return columns.values
    privileged = env.privileged
    return torch.stack(
        [
            policy.value(
                {name: value[h] for name, value in columns.features.items()},
                None if privileged is None else privileged[h],
            )
            for h in range(len(columns.log_probs))
        ]
    )


def _first_value(policy: Policy, observation: Observation, chunk: int, critic: Critic) -> Tensor:
    """V of each row's state as if a chunk began there, [B]: a value-only forward, no action is generated."""
    features: Features = policy.encode(observation) if critic is Critic.observation else {}
    privileged = observation.privileged
    repeated = None if privileged is None else privileged[:, None].expand(-1, chunk, -1)
    return policy.value(features, repeated)[:, 0]
