"""Learning from rollouts of the newest weights, for PPO and GRPO: samples, then epochs of minibatches.

columns of every block -> samples (a subclass's) -> [critic epochs] -> policy epochs -> new weights
                                                          |
                 before the first step the importance ratio must be 1 per token, or the update stops

With algorithm.tis_cap the ratio's denominator is training's own: all that was sampled is scored again first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.batch import Rollouts, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective
from rlinf_embodied.algorithms.losses import explained_variance, require_unit_ratio
from rlinf_embodied.algorithms.policy_learners import (
    POLICY,
    VALUE,
    VALUE_GROUP,
    VALUE_LOSS,
    Scored,
    replicated,
    sharded,
)
from rlinf_embodied.config import OnPolicyConfig, Precision, Sharding
from rlinf_embodied.device import is_accelerator
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Features, HasRunningStatistics, Record
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.update import Fitted, Shuffle, exceeds_kl, fit, minibatches, policy_metrics, value_metrics
from rlinf_embodied.runtime.host import StepContext

_RATIO_TOLERANCE = 1e-5  # of |log ratio| at unchanged weights, on a CPU


class OnPolicy(Algorithm):
    """The clipped objective; a subclass says what the samples and their advantages are."""

    algorithm: OnPolicyConfig

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        algorithm = self.algorithm
        self._any_row: tuple[Features, Record] | None = None  # of a sharded update
        self._is_sharded = algorithm.sharding is not Sharding.none
        if self._is_sharded:
            made = sharded(training, self._zero_loss)
        else:
            made = replicated(self.policy, algorithm, training.reducer)
        self.learners, self._joint = made.by_name, made.joint
        self._temperature = training.settings.temperature
        self._objective = Objective(algorithm, self._temperature, made.evaluate, self.policy.value, made.joint)

    def _zero_loss(self, scored: Scored) -> Tensor:
        """Returns 0 from a forward pass over a row of this rollout."""
        assert self._any_row is not None, "a pass is made within an update"
        return scored(*self._any_row, self._temperature, False).log_probs.sum() * 0.0

    @abstractmethod
    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        """Returns the samples of each block of this worker, with advantages and weights."""

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        if self._is_sharded:
            columns, _ = next(iter(data.values()))[0]
            first = lambda part: {name: value[0, :1] for name, value in part.items()}  # noqa: E731
            self._any_row = first(columns.features), first(columns.record)
        if self.algorithm.tis_cap is not None:
            data = {b: self._with_old_log_probs(parts) for b, parts in data.items()}
        self._iteration, self._blocks = step_context.iteration, self.samples(step_context, data)
        self._passed = self._blocks  # what passes read: compiled ones blocks of one size, with rows of padding
        if self.algorithm.compile:
            sizes = {b: sum(policy.log_probs.shape[:2].numel() for policy, _ in parts) for b, parts in data.items()}
            self._passed = {b: part.padded(sizes[b] + 1) if len(part) else part for b, part in self._blocks.items()}
        metrics = self._fit_critic()
        metrics["losses/initial_log_ratio"] = self._initial_log_ratio(step_context)
        metrics |= self._fit_policy()
        for learner in self.learners.values():
            learner.publish()
        self._update_statistics()
        self._any_row, self._blocks, self._passed = None, {}, {}
        return metrics

    def _update_statistics(self) -> None:
        """Lets the policy's running statistics take in what this iteration's samples hold."""
        policy = self.policy
        if isinstance(policy, HasRunningStatistics):
            returns = {b: None if t.returns is None else t.returns[t.valid] for b, t in self._blocks.items()}
            with torch.no_grad():
                sums = {b: policy.statistics_sums(t.features, returns[b]) for b, t in self._blocks.items()}
            policy.update_statistics(self.training.reducer.sum_blocks(sums))

    # ---------------------------------------------------------------------------------------------------------- steps
    def _minibatches(self, purpose: str, epochs: int) -> Iterator[dict[int, Tensor]]:
        sizes = {block: len(rows) for block, rows in self._blocks.items()}
        shuffle = Shuffle(self.training.seed, purpose, self._iteration)
        return minibatches(shuffle, sizes, self.algorithm.num_minibatches, epochs)

    def _fit_critic(self) -> dict[str, float]:
        """Runs the epochs of a critic with a separate optimizer on fixed targets."""
        if VALUE not in self.learners:
            return {}
        batches = self._minibatches("value", self.algorithm.value_epochs)
        passes = lambda block, index: self._objective.value_passes(self._passed[block], index)  # noqa: E731
        return value_metrics(fit(self.learners[VALUE], batches, passes), self._explained_variance())

    def _fit_policy(self) -> dict[str, float]:
        """Runs the policy's epochs until they are over or a minibatch exceeds the target KL.

        Where one optimizer trains the critic as well, warm-up and the critic's further epochs step its own parameters.
        """
        algorithm, learner, iteration = self.algorithm, self.learners[POLICY], self._iteration
        head = self._joint and VALUE_GROUP in learner.rates
        warming_up = algorithm.has_critic and iteration < algorithm.critic_warmup_iterations
        if warming_up and not head:
            return {}
        learner.lr = linear_decay(iteration, self.training.num_iterations, algorithm.lr, algorithm.lr_end_fraction)
        if head and algorithm.one_optimizer:
            learner.rates[VALUE_GROUP] = learner.lr
        fitted = self._steps(algorithm.epochs, critic_only=warming_up)
        further = algorithm.value_epochs - algorithm.epochs
        if head and not algorithm.one_optimizer and further > 0:
            self._steps(further, critic_only=True)
        metrics = policy_metrics(fitted) | {
            "losses/policy_steps": float(len(fitted.norms)),
            "losses/stopped_by_kl": float(fitted.stopped),
            "charts/learning_rate": learner.lr,
        }
        if self._joint:
            metrics["losses/value_loss"] = fitted.sums[VALUE_LOSS] / max(fitted.weight, 1e-8)
            metrics["losses/explained_variance"] = self._explained_variance()
        return metrics

    def _steps(self, epochs: int, *, critic_only: bool) -> Fitted:
        """Steps the policy, and a critic that shares its optimizer; or that critic's own parameters alone."""
        batches = self._minibatches("value" if critic_only else "policy", epochs)
        passes = lambda block, index: self._objective.policy_passes(self._passed[block], index, critic_only)  # noqa: E731
        stop = exceeds_kl(None if critic_only else self.algorithm.target_kl)
        return fit(self.learners[POLICY], batches, passes, stop, (VALUE_GROUP,) if critic_only else None)

    def _explained_variance(self) -> float:
        """Returns how much of the returns' variance the values before the update explain."""
        columns = {b: (cast(Tensor, t.values), cast(Tensor, t.returns), t.valid) for b, t in self._blocks.items()}
        return explained_variance(columns, self.training.reducer.sum_blocks)

    # ---------------------------------------------------------------------------------------------------------- ratio
    @torch.no_grad()
    def _score(self, features: Features, record: Record) -> Tensor:
        """Returns training's log-probs of choices, [B, C, K], by the copy that other stages read: the same weights.

        Calls have the size of a block: a row's last bits depend on the size of its batch.
        """
        found = self.policy.evaluate(features, record, self._temperature)
        if found.entropy is None and self.algorithm.entropy_coef:
            raise ConfigError(
                f"algorithm.entropy_coef is {self.algorithm.entropy_coef:g}, but "
                f"{self.training.settings._target_} has no entropy in closed form: use 0"
            )
        return found.log_probs

    def _with_old_log_probs(self, rollouts: Rollouts) -> Rollouts:
        """Adds training's log-probs of every choice to a block's rollouts, next to the recorded ones."""
        at = lambda part, h: {name: value[h] for name, value in part.items()}  # noqa: E731
        made = []
        for columns, env in rollouts:
            steps = range(len(columns.log_probs))
            scored = [self._score(at(columns.features, h), at(columns.record, h)) for h in steps]
            made.append((replace(columns, old_log_probs=torch.stack(scored)), env))
        return made

    def _initial_log_ratio(self, step_context: StepContext) -> float:
        """Returns the largest |training's log-prob - recorded one| of a choice, before any step of the policy.

        With a cap over all samples; without one, on each block's first minibatch with samples.

        Raises:
            ObjectiveError: it is more than rounding where the same weights have sampled.
        """
        batches = list(self._minibatches("policy", 1))
        first = {b: next((rows[b] for rows in batches if len(rows[b])), batches[0][b]) for b in self._blocks}
        found = {b: self._largest_log_ratio(block, first[b]) for b, block in self._blocks.items()}
        largest = float(torch.stack(list(self.training.reducer.gather_blocks(found).values())).max())
        tolerance = self.algorithm.ratio_tolerance
        exact = self.algorithm.precision is Precision.float32 and not is_accelerator(self.training.context.device)
        if step_context.staleness == 0 and (tolerance is not None or exact):
            require_unit_ratio(largest, _RATIO_TOLERANCE if tolerance is None else tolerance)
        return largest

    def _largest_log_ratio(self, block: TrainingBlock, index: Tensor) -> Tensor:
        size, zero = self.training.block_size, torch.zeros(1, device=block.valid.device)
        differences = [zero]
        if block.rollout_log_probs is not None:
            differences.append((block.old_log_probs - block.rollout_log_probs)[block.valid])
        elif len(index):
            for part in index.split(size):
                rows = block.rows(torch.cat([part, part[:1].expand(size - len(part))]))  # copies of its first row
                now = self._score(rows.features, rows.record)
                differences.append((now - rows.old_log_probs)[: len(part)][rows.valid[: len(part)]])
        return torch.cat([part.abs().reshape(-1) for part in differences]).max().reshape(1)
