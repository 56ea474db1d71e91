"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): advantages by GAE with a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms import batch
from rlinf_embodied.algorithms.advantages import chunk_major, chunk_steps, gae, next_values, standardized, time_major
from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, Rollouts, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Normalization
from rlinf_embodied.algorithms.on_policy import OnPolicy, OnPolicyConfig
from rlinf_embodied.config import Critic, EnvConfig, Level
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Features, Policy
from rlinf_embodied.runtime.host import StepContext

_MAX_TASKS = 256  # in a block


@dataclass(kw_only=True, slots=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation (arXiv:1707.06347) with a critic."""

    name = "ppo"
    has_critic = True

    def typical_iteration(self, env: EnvConfig) -> int:
        return self.critic_warmup_iterations

    def make(self, training: Training) -> PPO:
        return PPO(training)


class PPO(OnPolicy):
    """Fits the critic on fixed targets first, then the policy."""

    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        """Returns samples with standardised advantages, unless each minibatch is standardised separately."""
        critic = self.training.settings.critic
        return self._normalised(
            {block: ppo_block(self.policy, parts, self.algorithm, critic) for block, parts in rollouts.items()}
        )

    def _normalised(self, raw: Mapping[int, TrainingBlock]) -> dict[int, TrainingBlock]:
        over, reducer = self.algorithm.normalize_advantages, self.training.reducer
        if over is Normalization.minibatch:
            return dict(raw)
        advantages = {b: t.advantages for b, t in raw.items()}
        for task in self._tasks(raw) if over is Normalization.task else (None,):
            mask = {b: t.valid if task is None else t.valid & (t.tasks == task)[:, None] for b, t in raw.items()}
            standardised = standardized({b: (t.advantages, mask[b]) for b, t in raw.items()}, reducer.sum_blocks)
            advantages = {b: torch.where(mask[b], standardised[b], previous) for b, previous in advantages.items()}
        return {b: replace(t, advantages=advantages[b]) for b, t in raw.items()}

    def _tasks(self, blocks: Mapping[int, TrainingBlock]) -> list[int]:
        """Returns the task ids of all workers."""
        tables = {b: torch.full((_MAX_TASKS,), -1) for b in blocks}
        for b, table in tables.items():
            tasks = cast(Tensor, blocks[b].tasks).unique().cpu()
            rule, action = "a block of env rows has more tasks", "use batch"
            require(len(tasks) <= _MAX_TASKS, "algorithm.normalize_advantages", "task", rule, action)
            table[: len(tasks)] = tasks
        gathered = self.training.reducer.gather_blocks(tables).values()
        return sorted({int(task) for table in gathered for task in table} - {-1})


@torch.no_grad()
def ppo_block(
    policy: Policy, rollouts: Rollouts, algorithm: OnPolicyConfig, critic: Critic = Critic.privileged
) -> TrainingBlock:
    """Returns a block's samples with GAE advantages per env step (not yet normalised) and the critic's targets."""
    return batch.concatenate([_ppo_rollout(policy, columns, env, algorithm, critic) for columns, env in rollouts])


def _ppo_rollout(
    policy: Policy, columns: PolicyColumns, env: EnvColumns, algorithm: OnPolicyConfig, critic: Critic
) -> TrainingBlock:
    values = columns.values if columns.values is not None else _values_of_rollout(policy, columns, env)
    chunk, final, time_out = values.shape[2], torch.zeros_like(values), env.truncated
    bootstraps = algorithm.bootstraps(critic)
    if bootstraps and env.final is not None:
        step, row = env.final_index.T
        final[step, row] = _first_value(policy, env.final, chunk, critic)[:, None]
    # without bootstrapping, a time-out is treated as a termination, since the critic sees the time
    truncated = time_out if bootstraps else torch.zeros_like(time_out)
    terminated = env.terminated if bootstraps else env.terminated | time_out
    steps, valid, ended, cut = (time_major(part) for part in (values, env.valid, terminated, truncated))
    following = next_values(steps, time_major(final), _first_value(policy, env.last, chunk, critic), cut, valid)
    gamma = algorithm.gamma if env.discounts is None else time_major(env.discounts)
    rewards, lam = time_major(env.rewards), algorithm.gae_lambda
    advantages, returns = gae(rewards, steps, following, ended, cut, valid, gamma, lam)
    advantages = chunk_major(advantages, chunk)
    if algorithm.ratio_level is Level.chunk and env.discounts is None:  # else steps stand for several
        # a chunk is one step, its advantage repeated for each action; the value after it is that after its last action
        whole = chunk_steps(env.rewards, terminated, truncated, env.valid, algorithm.gamma)
        last = env.valid.sum(-1, keepdim=True).clamp(min=1) - 1
        after = chunk_major(following, chunk).gather(2, last)[..., 0]
        flags = (whole.terminated, whole.truncated, whole.valid)
        decay = values.new_tensor(lam) ** whole.length
        of_chunks, _ = gae(whole.rewards, values[:, :, 0], after, *flags, whole.discount, decay)
        advantages = of_chunks[..., None].expand_as(values).contiguous()
    weights = env.valid.to(torch.float32)
    return batch.training_block(columns, env, advantages, weights, values, chunk_major(returns, chunk))


def _values_of_rollout(policy: Policy, columns: PolicyColumns, env: EnvColumns) -> Tensor:
    """Returns V before each action of the rollout, [H, B, C], computed per chunk-step, as acting would."""
    at = lambda h: {name: value[h] for name, value in columns.features.items()}  # noqa: E731
    privileged = env.privileged
    steps = range(len(columns.log_probs))
    return torch.stack([policy.value(at(h), None if privileged is None else privileged[h]) for h in steps])


def _first_value(policy: Policy, observation: Observation, chunk: int, critic: Critic) -> Tensor:
    """Returns V of each row's state as the start of a chunk, [B], without generating actions."""
    features: Features = policy.encode(observation) if critic is Critic.observation else {}
    privileged = observation.privileged
    repeated = None if privileged is None else privileged[:, None].expand(-1, chunk, -1)
    return policy.value(features, repeated)[:, 0]
