"""Learning from rollouts of the newest weights, for PPO and GRPO: samples, then epochs of minibatches.

columns of every block -> samples (a subclass's) -> [critic epochs] -> policy epochs -> new weights
                                                          |
                 before the first step the importance ratio must be 1 per token, or the update stops

With algorithm.tis_cap the ratio's denominator is training's own: all that was sampled is scored again first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.batch import Rollouts, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective
from rlinf_embodied.algorithms.losses import explained_variance, require_unit_ratio
from rlinf_embodied.algorithms.off_policy import (
    capped,
    joined,
    mismatch_metrics,
    mismatch_of_rollouts,
    mismatch_of_samples,
    with_old_log_probs,
)
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
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import is_accelerator
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Features, HasRunningStatistics, Record
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.update import Fitted, Shuffle, exceeds_kl, fit, minibatches, policy_metrics, value_metrics
from rlinf_embodied.runtime.host import StepContext

_RATIO_TOLERANCE = 1e-5  # of |log ratio| at unchanged weights, on a CPU


@dataclass(frozen=True, slots=True)
class _Samples:
    """The samples of an iteration, by block of this worker."""

    iteration: int
    blocks: Mapping[int, TrainingBlock]
    padded: Mapping[int, TrainingBlock]  # what passes read: compiled ones blocks of one size, with rows of padding


class OnPolicy(Algorithm):
    """The clipped objective; a subclass says what the samples and their advantages are."""

    algorithm: OnPolicyConfig

    def __init__(self, training: Training) -> None:
        """Makes the learners."""
        super().__init__(training)
        algorithm = self.algorithm
        self._any_row: tuple[Features, Record] | None = None  # of a sharded update
        whole, rule = algorithm.sharding is Sharding.none, "the policy's running statistics would miss the sliced copy"
        keeps = isinstance(self.policy, HasRunningStatistics)
        require(whole or not keeps, "algorithm.sharding", algorithm.sharding.value, rule, "use none")
        made = replicated(self.policy, algorithm, training.reducer) if whole else sharded(training, self._zero_loss)
        self.learners, self._joint = dict(made.by_name), made.joint
        temperature = training.settings.temperature
        self._objective = Objective(algorithm, temperature, made.evaluate, self.policy.value, made.joint)

    def _zero_loss(self, scored: Scored) -> Tensor:
        """Returns 0 from a forward pass over a row of this rollout."""
        assert self._any_row is not None, "a pass is made within an update"
        features, record = self._any_row
        return scored(features, record, self.training.settings.temperature, False).log_probs.sum() * 0.0

    @abstractmethod
    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        """Returns the samples of each block of this worker, with advantages and weights."""

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        """See Algorithm."""
        if self.algorithm.sharding is not Sharding.none:
            columns, _ = next(iter(data.values()))[0]
            first = lambda part: {name: value[0, :1] for name, value in part.items()}  # noqa: E731
            self._any_row = first(columns.features), first(columns.record)
        if self.algorithm.tis_cap is not None:
            data = {b: with_old_log_probs(self._score_as_sampled, parts) for b, parts in data.items()}
        blocks = self.samples(step_context, data)
        samples = _Samples(step_context.iteration, blocks, self._padded(blocks, data))
        metrics = self._fit_critic(samples)
        metrics |= self._compare(step_context, data, samples)
        metrics |= self._fit_policy(samples)
        for learner in self.learners.values():
            learner.publish()
        self._update_statistics(blocks)
        self._any_row = None
        return metrics

    def _padded(
        self, blocks: Mapping[int, TrainingBlock], rollouts: Mapping[int, Rollouts]
    ) -> Mapping[int, TrainingBlock]:
        if not self.algorithm.compile:
            return blocks
        sizes = {b: sum(policy.log_probs.shape[:2].numel() for policy, _ in parts) for b, parts in rollouts.items()}
        return {b: block.padded(sizes[b] + 1) if len(block) else block for b, block in blocks.items()}

    def _update_statistics(self, blocks: Mapping[int, TrainingBlock]) -> None:
        """Lets the policy's running statistics take in what this iteration's samples hold."""
        policy = self.policy
        if isinstance(policy, HasRunningStatistics):
            returns = {b: None if t.returns is None else t.returns[t.valid] for b, t in blocks.items()}
            with torch.no_grad():
                sums = {b: policy.statistics_sums(t.features, returns[b]) for b, t in blocks.items()}
            policy.update_statistics(self.training.reducer.sum_blocks(sums))

    # ---------------------------------------------------------------------------------------------------------- steps
    def _minibatches(self, samples: _Samples, purpose: str, epochs: int) -> Iterator[dict[int, Tensor]]:
        sizes = {block: len(rows) for block, rows in samples.blocks.items()}
        shuffle = Shuffle(self.training.seed, purpose, samples.iteration)
        return minibatches(shuffle, sizes, self.algorithm.num_minibatches, epochs)

    def _fit_critic(self, samples: _Samples) -> dict[str, float]:
        """Runs the epochs of a critic with a separate optimizer on fixed targets."""
        if VALUE not in self.learners:
            return {}
        batches = self._minibatches(samples, "value", self.algorithm.value_epochs)
        passes = lambda block, index: self._objective.value_passes(samples.padded[block], index)  # noqa: E731
        return value_metrics(fit(self.learners[VALUE], batches, passes), self._explained_variance(samples))

    def _fit_policy(self, samples: _Samples) -> dict[str, float]:
        """Runs the policy's epochs until they are over or a minibatch exceeds the target KL.

        Where one optimizer trains the critic as well, warm-up and the critic's further epochs step its own parameters.
        """
        algorithm, learner = self.algorithm, self.learners[POLICY]
        head = self._joint and VALUE_GROUP in learner.rates
        warming_up = algorithm.has_critic and samples.iteration < algorithm.critic_warmup_iterations
        if warming_up and not head:
            return {}
        learner.lr = linear_decay(
            samples.iteration, self.training.num_iterations, algorithm.lr, algorithm.lr_end_fraction
        )
        if head and algorithm.one_optimizer:
            learner.rates[VALUE_GROUP] = learner.lr
        fitted = self._steps(samples, algorithm.epochs, critic_only=warming_up)
        further = algorithm.value_epochs - algorithm.epochs
        if head and not algorithm.one_optimizer and further > 0:
            self._steps(samples, further, critic_only=True)
        metrics = policy_metrics(fitted) | {
            "losses/policy_steps": float(len(fitted.norms)),
            "losses/stopped_by_kl": float(fitted.stopped),
            "charts/learning_rate": learner.lr,
        }
        if self._joint:
            metrics["losses/value_loss"] = fitted.sums[VALUE_LOSS] / max(fitted.weight, 1e-8)
            metrics["losses/explained_variance"] = self._explained_variance(samples)
        return metrics

    def _steps(self, samples: _Samples, epochs: int, *, critic_only: bool) -> Fitted:
        """Steps the policy, and a critic that shares its optimizer; or that critic's own parameters alone."""
        batches = self._minibatches(samples, "value" if critic_only else "policy", epochs)
        passes = lambda block, index: self._objective.policy_passes(samples.padded[block], index, critic_only)  # noqa: E731
        stop = exceeds_kl(None if critic_only else self.algorithm.target_kl)
        return fit(self.learners[POLICY], batches, passes, stop, (VALUE_GROUP,) if critic_only else None)

    def _explained_variance(self, samples: _Samples) -> float:
        """Returns how much of the returns' variance the values before the update explain."""
        columns = {b: (cast(Tensor, t.values), cast(Tensor, t.returns), t.valid) for b, t in samples.blocks.items()}
        return explained_variance(columns, self.training.reducer.sum_blocks)

    # ---------------------------------------------------------------------------------------------------------- ratio
    @torch.no_grad()
    def _score_as_sampled(self, features: Features, record: Record) -> Tensor:
        """Returns the log-probs of choices by the copy that other stages read, whose weights are the same."""
        found = self.policy.evaluate(features, record, self.training.settings.temperature)
        if found.entropy is None and self.algorithm.entropy_coef:
            raise ConfigError(
                f"algorithm.entropy_coef is {self.algorithm.entropy_coef:g}, but "
                f"{self.training.settings._target_} has no entropy in closed form: use 0"
            )
        return found.log_probs

    def _compare(
        self, step_context: StepContext, rollouts: Mapping[int, Rollouts], samples: _Samples
    ) -> dict[str, float]:
        """Measures how far training's log-probs are from those recorded, before any step of the policy.

        With a cap over all valid actions; without one, on each block's first minibatch with samples.
        """
        cap, score, size = self.algorithm.tis_cap, self._score_as_sampled, self.training.block_size
        if cap is None:
            batches = list(self._minibatches(samples, "policy", 1))
            first = {b: next((r[b] for r in batches if len(r[b])), batches[0][b]) for b in samples.blocks}
            found = {b: mismatch_of_samples(score, samples.blocks[b], index, size) for b, index in first.items()}
        else:
            found = {b: mismatch_of_rollouts(parts) for b, parts in rollouts.items()}
        total = joined(self.training.reducer.gather_blocks(found).values())
        largest, tolerance = float(total[2]), self.algorithm.ratio_tolerance
        exact = self.algorithm.precision is Precision.float32 and not is_accelerator(self.training.context.device)
        if step_context.staleness == 0 and (tolerance is not None or exact):
            require_unit_ratio(largest, _RATIO_TOLERANCE if tolerance is None else tolerance)
        metrics = {"losses/initial_log_ratio": largest}
        if cap is not None:
            metrics |= mismatch_metrics(total)
            counts = {b: capped(parts, self.algorithm.ratio_level, cap) for b, parts in rollouts.items()}
            above, every = torch.stack(list(self.training.reducer.gather_blocks(counts).values())).sum(0).tolist()
            metrics["losses/importance_capped"] = above / max(every, 1)
        return metrics
