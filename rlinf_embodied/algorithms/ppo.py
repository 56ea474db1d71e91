"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): advantages by GAE with a critic."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.losses import explained_variance
from rlinf_embodied.algorithms.on_policy import Blocks, OnPolicy, explained_sums
from rlinf_embodied.algorithms.policy_learners import VALUE
from rlinf_embodied.algorithms.rollout_samples import Rollouts, normalize_blocks, ppo_block
from rlinf_embodied.learning.update import fit, value_metrics
from rlinf_embodied.runtime.host import StepContext


class PPO(OnPolicy):
    """Fits the critic on fixed targets first, then the policy."""

    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        """Returns samples whose advantages have mean 0 and standard deviation 1 over all blocks of all workers."""
        critic = self.training.settings.critic
        raw = {block: ppo_block(self.policy, parts, self.algorithm, critic) for block, parts in rollouts.items()}
        return normalize_blocks(raw, self.training.reducer)

    def warms_up(self, iteration: int) -> bool:
        return iteration < self.algorithm.critic_warmup_iterations

    def fit_critic(
        self,
        step_context: StepContext,
        blocks: Blocks,
        padded: Blocks,
    ) -> dict[str, float]:
        """Runs the critic's epochs on fixed targets."""
        if VALUE not in self.learners:
            return {}
        batches = self.minibatches(step_context, blocks, "value", self.algorithm.value_epochs)
        passes = lambda block, index: self._objective.value_passes(padded[block], index)  # noqa: E731
        fitted = fit(self.learners[VALUE], batches, passes)
        sums = self.training.reducer.sum_blocks({b: explained_sums(t) for b, t in blocks.items()})
        return value_metrics(fitted, explained_variance(sums))
