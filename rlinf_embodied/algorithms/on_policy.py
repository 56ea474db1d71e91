"""Learning from rollouts of the newest weights, for PPO and GRPO: samples, then epochs of minibatches.

columns of every block -> samples (a subclass's) -> [critic epochs] -> policy epochs -> new weights
                                                          |
                 before the first step the importance ratio must be 1 per token, or the update stops

With algorithm.tis_cap the ratio's denominator is training's own: all that was sampled is scored again first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add

import torch
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.batch import PolicyColumns, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective
from rlinf_embodied.algorithms.losses import explained_variance, explained_variance_sums, require_unit_ratio
from rlinf_embodied.algorithms.off_policy import Mismatch
from rlinf_embodied.algorithms.old_log_probs import (
    capped,
    mismatch_of_rollouts,
    mismatch_of_samples,
    with_old_log_probs,
)
from rlinf_embodied.algorithms.policy_learners import POLICY, VALUE_GROUP, VALUE_LOSS, Learners, Scored
from rlinf_embodied.algorithms.rollout_samples import Rollouts
from rlinf_embodied.config import OnPolicyConfig, Precision, Sharding
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import is_accelerator
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Features, HasRunningStatistics, Record
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.update import Fitted, Shuffle, exceeds_kl, fit, minibatches, policy_metrics
from rlinf_embodied.runtime.host import StepContext

_RATIO_TOLERANCE = 1e-5  # of |log ratio| at unchanged weights, on a CPU

Blocks = Mapping[int, TrainingBlock]


class OnPolicy(Algorithm):
    """The clipped objective; a subclass says what the samples and their advantages are."""

    algorithm: OnPolicyConfig

    def __init__(self, training: Training) -> None:
        """Makes the learners.

        Raises:
            ObjectiveError: the policy has nothing to train.
            ConfigError: there is no critic to train, or the policy cannot be sharded.
        """
        super().__init__(training)
        algorithm, reducer = self.algorithm, training.reducer
        self._any_row: tuple[Features, Record] | None = None  # of a sharded update
        whole, rule = algorithm.sharding is Sharding.none, "the policy's running statistics would miss the sliced copy"
        keeps = isinstance(self.policy, HasRunningStatistics)
        require(whole or not keeps, "algorithm.sharding", algorithm.sharding.value, rule, "use none")
        if whole:
            made = Learners.replicated(self.policy, algorithm, reducer)
        else:
            settings = (algorithm, reducer, training.context, training.exact)
            made = Learners.sharded(self.policy, training.copy, self._zero_loss, *settings)
        self.learners, self._joint = made.by_name, made.joint
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

    def fit_critic(self, step_context: StepContext, blocks: Blocks, padded: Blocks) -> dict[str, float]:
        """Trains the critic with a separate optimizer; does nothing without a critic."""
        return {}

    def warms_up(self, iteration: int) -> bool:
        """Returns whether an iteration trains the critic alone."""
        return False

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        """See Algorithm.

        Raises:
            ObjectiveError: the ratio is not 1 at the start.
        """
        if self.algorithm.sharding is not Sharding.none:
            self._any_row = _first_row(next(iter(data.values()))[0][0])
        if self.algorithm.tis_cap is not None:
            data = {b: with_old_log_probs(self._score_as_sampled, parts) for b, parts in data.items()}
        blocks = self.samples(step_context, data)
        padded = self._padded(blocks, data)
        metrics = self.fit_critic(step_context, blocks, padded)
        metrics |= self._compare(step_context, data, blocks)
        metrics |= self._fit_policy(step_context, blocks, padded)
        for learner in self.learners.values():
            learner.publish()
        self._update_statistics(blocks)
        self._any_row = None
        return metrics

    def _update_statistics(self, blocks: Mapping[int, TrainingBlock]) -> None:
        """Lets the policy's running statistics take in what this iteration's samples show."""
        policy = self.policy
        if isinstance(policy, HasRunningStatistics):
            with torch.no_grad():
                sums = {b: policy.statistics_sums(t.features, _valid_returns(t)) for b, t in blocks.items()}
            policy.update_statistics(self.training.reducer.sum_blocks(sums))

    def minibatches(
        self, step_context: StepContext, blocks: Mapping[int, TrainingBlock], purpose: str, epochs: int
    ) -> Iterator[dict[int, Tensor]]:
        sizes = {block: len(samples) for block, samples in blocks.items()}
        shuffle = Shuffle(self.training.seed, purpose, step_context.iteration)
        return minibatches(shuffle, sizes, self.algorithm.num_minibatches, epochs)

    def _padded(
        self, blocks: Mapping[int, TrainingBlock], rollouts: Mapping[int, Rollouts]
    ) -> Mapping[int, TrainingBlock]:
        """Returns what passes read: compiled ones blocks of one size, with a row of padding or more."""
        if not self.algorithm.compile:
            return blocks
        sizes = {b: sum(policy.log_probs.shape[:2].numel() for policy, _ in parts) for b, parts in rollouts.items()}
        return {b: block.padded(sizes[b] + 1) if len(block) else block for b, block in blocks.items()}

    def _fit_policy(
        self,
        step_context: StepContext,
        blocks: Mapping[int, TrainingBlock],
        padded: Mapping[int, TrainingBlock],
    ) -> dict[str, float]:
        """Runs the policy's epochs until they are over or a minibatch exceeds the target KL.

        Where one optimizer trains the critic as well, warm-up and the critic's further epochs step its own parameters.
        """
        algorithm, learner = self.algorithm, self.learners[POLICY]
        warming_up = self.warms_up(step_context.iteration)
        if warming_up and not (self._joint and VALUE_GROUP in learner.rates):
            return {}
        learner.lr = linear_decay(
            step_context.iteration, self.training.num_iterations, algorithm.lr, algorithm.lr_end_fraction
        )
        if self._joint and algorithm.one_optimizer and VALUE_GROUP in learner.rates:
            learner.rates[VALUE_GROUP] = learner.lr
        fitted = self._steps(learner, blocks, padded, step_context, algorithm.epochs, critic_only=warming_up)
        further = 0 if not self._joint or algorithm.one_optimizer else algorithm.value_epochs - algorithm.epochs
        if further > 0 and VALUE_GROUP in learner.rates:
            self._steps(learner, blocks, padded, step_context, further, critic_only=True)
        return self._policy_metrics(fitted) | (self._joint_metrics(fitted, blocks) if self._joint else {})

    def _steps(
        self,
        learner: Learner,
        blocks: Mapping[int, TrainingBlock],
        padded: Mapping[int, TrainingBlock],
        step_context: StepContext,
        epochs: int,
        *,
        critic_only: bool,
    ) -> Fitted:
        """Steps the policy, and a critic that shares its optimizer; or that critic's own parameters alone."""
        purpose = "value" if critic_only else "policy"
        batches = self.minibatches(step_context, blocks, purpose, epochs)
        passes = lambda block, index: self._objective.policy_passes(padded[block], index, critic_only)  # noqa: E731
        stop = exceeds_kl(None if critic_only else self.algorithm.target_kl)
        return fit(learner, batches, passes, stop, (VALUE_GROUP,) if critic_only else None)

    def _joint_metrics(self, fitted: Fitted, blocks: Mapping[int, TrainingBlock]) -> dict[str, float]:
        explained = self.training.reducer.sum_blocks({b: explained_sums(t) for b, t in blocks.items()})
        loss = fitted.sums[VALUE_LOSS] / max(fitted.weight, 1e-8)
        return {"losses/value_loss": loss, "losses/explained_variance": explained_variance(explained)}

    @torch.no_grad()
    def _score_as_sampled(self, features: Features, record: Record) -> Tensor:
        """Returns what the copy of other stages says of choices, which are of the same weights."""
        found = self.policy.evaluate(features, record, self.training.settings.temperature)
        if found.entropy is None and self.algorithm.entropy_coef:
            raise ConfigError(
                f"algorithm.entropy_coef is {self.algorithm.entropy_coef:g}, but "
                f"{self.training.settings._target_} has no entropy in closed form: use 0"
            )
        return found.log_probs

    def _compare(
        self, step_context: StepContext, rollouts: Mapping[int, Rollouts], blocks: Mapping[int, TrainingBlock]
    ) -> dict[str, float]:
        """Measures how far training's log-probs are from those recorded, before any step of the policy.

        With a cap over all valid actions; without one, on each block's first minibatch with samples.

        Raises:
            ObjectiveError: a token's are further apart than rounding explains.
        """
        cap, score, size = self.algorithm.tis_cap, self._score_as_sampled, self.training.block_size
        if cap is None:
            first = self._first_rows(step_context, blocks)
            found = {b: mismatch_of_samples(score, blocks[b], index, size) for b, index in first.items()}
        else:
            found = {b: mismatch_of_rollouts(parts) for b, parts in rollouts.items()}
        stacked = self.training.reducer.gather_blocks({b: apart.stacked() for b, apart in found.items()})
        apart = reduce(add, (Mismatch.of(part) for part in stacked.values()))
        largest, tolerance = float(apart.abs_max), self.algorithm.ratio_tolerance
        exact = self.algorithm.precision is Precision.float32 and not is_accelerator(self.training.context.device)
        if step_context.staleness == 0 and (tolerance is not None or exact):
            require_unit_ratio(largest, _RATIO_TOLERANCE if tolerance is None else tolerance)
        metrics = {"losses/initial_log_ratio": largest}
        if cap is not None:
            metrics |= {f"losses/{name}": value for name, value in apart.metrics().items()}
            counts = {b: capped(parts, self.algorithm.ratio_level, cap) for b, parts in rollouts.items()}
            above, every = torch.stack(list(self.training.reducer.gather_blocks(counts).values())).sum(0).tolist()
            metrics["losses/importance_capped"] = above / max(every, 1)
        return metrics

    def _first_rows(self, step_context: StepContext, blocks: Mapping[int, TrainingBlock]) -> dict[int, Tensor]:
        batches = list(self.minibatches(step_context, blocks, "policy", 1))
        return {b: next((rows[b] for rows in batches if len(rows[b])), batches[0][b]) for b in blocks}

    def _policy_metrics(self, fitted: Fitted) -> dict[str, float]:
        return policy_metrics(fitted) | {
            "losses/policy_steps": float(len(fitted.norms)),
            "losses/stopped_by_kl": float(fitted.stopped),
            "charts/learning_rate": self.learners[POLICY].lr,
        }


def explained_sums(block: TrainingBlock) -> Tensor:
    """Returns the sums of a block from which the explained variance of its values follows."""
    assert block.values is not None
    assert block.returns is not None
    return explained_variance_sums(block.values, block.returns, block.valid)


def _valid_returns(block: TrainingBlock) -> Tensor | None:
    return None if block.returns is None else block.returns[block.valid]


def _first_row(columns: PolicyColumns) -> tuple[Features, Record]:
    """Returns the first row's features and record, a batch of one."""
    return tuple({name: value[0, :1] for name, value in part.items()} for part in (columns.features, columns.record))  # pyright: ignore[reportReturnType]
