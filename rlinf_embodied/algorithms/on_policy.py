"""On-policy training, for PPO and GRPO: samples from rollouts, then epochs of minibatches.

columns of every block -> samples (a subclass's) -> [critic epochs] -> policy epochs -> new weights
                                                          |
                 before the first step the importance ratio must be 1 per token, or the update stops

With algorithm.tis_cap, training first rescores all samples, which gives the ratio's denominator.

               trained by                      passes read            other stages read
replicated     one learner each, or one of     the worker's copy      the worker's copy
               both: see `joint`
fsdp2          POLICY: a second copy, sliced   the sliced copy        the worker's copy, which each update renews
               VALUE: as replicated            the worker's copy      the worker's copy
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from rlinf_embodied.algorithms.advantages import standardized
from rlinf_embodied.algorithms.algorithm import Algorithm, Behind, Training, adam
from rlinf_embodied.algorithms.batch import Rollouts, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import (
    CHUNKS,
    IMITATION_LOSS,
    REFERENCE_KL,
    Normalization,
    Objective,
    OnPolicyConfig,
    policy_statistics,
)
from rlinf_embodied.algorithms.cloning import CloningTerm
from rlinf_embodied.algorithms.losses import LARGEST_LOG_RATIO, explained_variance, require_unit_ratio
from rlinf_embodied.config import Critic, Precision, Sharding
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import is_accelerator
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Features, HasRunningStatistics, HasValueFeatures, Policy, Record
from rlinf_embodied.learning import update
from rlinf_embodied.learning.gradients import Pass
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import AdamSettings, ParameterGroup, linear_decay
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import VALUE_STATISTICS, Fitted
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.telemetry.boards import BINS, Histogram

POLICY, VALUE = "policy_optimizer", "value_optimizer"  # in a checkpoint
VALUE_GROUP = "value"  # parameters that only the critic has, in an optimizer that trains both
VALUE_LOSS = "value_loss"  # statistic of passes that train both
_RATIO_TOLERANCE = 1e-5  # of |log ratio| at unchanged weights, on a CPU


class OnPolicy(Algorithm):
    """Trains with the clipped objective; subclasses define the samples and their advantages."""

    algorithm: OnPolicyConfig

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        algorithm = self.algorithm
        self._any_row: tuple[Features, Record] | None = None  # of a sharded update
        self._is_sharded = algorithm.sharding is not Sharding.none
        evaluate, self._joint = self.policy.evaluate, False
        if self._is_sharded:
            behind = self._sliced()
            evaluate = lambda *inputs: behind(lambda policy: policy.evaluate(*inputs))  # noqa: E731
        else:
            self.learners, self._joint = replicated(self.policy, algorithm, training.reducer)
        self._temperature = training.settings.temperature
        self.cloning = CloningTerm(training) if algorithm.uses_demonstrations else None
        self._reference = self._made_reference() if algorithm.needs_reference else None
        scale = getattr(self.policy, "return_scale", None)
        self._objective = Objective(algorithm, self._temperature, evaluate, self.policy.value, self._joint, scale)

    def _made_reference(self) -> Policy:
        """Returns a copy of the initial policy, which is one of the modules and so part of checkpoints."""
        has_statistics, coef = isinstance(self.policy, HasRunningStatistics), self.algorithm.kl_coef
        path, value = ("kl_coef", coef) if coef else ("loss", type(self.algorithm.loss).__name__)
        rule, action = "the policy has running statistics, which a copy would not update", "leave it out"
        require(not has_statistics, f"algorithm.{path}", value, rule, f"{action}, or use another policy")
        reference = self.training.copy()
        self.modules["reference"] = reference.module.requires_grad_(False).to(self.training.context.device)
        return reference

    def zero_loss(self) -> Tensor:
        assert self._any_row is not None, "passes run within an update"
        return self._objective.evaluate(*self._any_row, self._temperature, False).log_probs.sum() * 0.0

    def _sliced(self) -> Behind:
        """Creates the learners, with a sharded copy of the policy, and returns this copy.

        Raises:
            ConfigError: there are several workers in an exact run, or the policy cannot be sharded.
        """
        algorithm, view, path = self.algorithm, self.policy, "algorithm.sharding"
        critic, (main, value) = _critic(view, algorithm), _settings(algorithm)
        disjoint = {id(p) for p in view.policy_parameters()}.isdisjoint(id(p) for p in critic)
        has_statistics = isinstance(view, HasRunningStatistics)
        rule = "the policy's running statistics would miss the sliced copy"
        require(not has_statistics, path, "fsdp2", rule, "use none")
        rule = "the critic shares parameters with the policy, and cannot be sharded"
        require(disjoint, path, "fsdp2", rule, "set policy.critic=privileged")
        behind, learner = self.sharded(lambda policy: policy.policy_parameters(), main, policy_statistics(algorithm))
        self.learners[POLICY] = learner
        if critic:
            self.learners[VALUE] = Learner(critic, value, VALUE_STATISTICS, self.training.reducer)
        return behind

    @abstractmethod
    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        """Returns the samples of each block of this worker, with advantages and weights."""

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        if self._is_sharded:
            columns, _ = next(iter(data.values()))[0]
            first = lambda part: {name: value[0, :1] for name, value in part.items()}  # noqa: E731
            self._any_row = first(columns.features), first(columns.record)
        if self.algorithm.tis_cap is not None:
            data = {b: self._scored(self.policy, "old_log_probs", parts) for b, parts in data.items()}
        if self._reference is not None:
            data = {b: self._scored(self._reference, "reference_log_probs", parts) for b, parts in data.items()}
        self._iteration, self._blocks = step_context.iteration, self.samples(step_context, data)
        metrics = self._fit_critic()
        metrics["losses/initial_log_ratio"] = self._initial_log_ratio(step_context)
        metrics |= self._fit_policy()
        for learner in self.learners.values():
            learner.publish()
        self._update_statistics()
        self._any_row, self._blocks = None, {}
        return metrics

    def _update_statistics(self) -> None:
        """Updates the policy's running statistics with this iteration's samples."""
        policy = self.policy
        if isinstance(policy, HasRunningStatistics):
            returns = {b: None if t.returns is None else t.returns[t.valid] for b, t in self._blocks.items()}
            with torch.no_grad():
                sums = {b: policy.statistics_sums(t.features, returns[b]) for b, t in self._blocks.items()}
            policy.update_statistics(self.training.reducer.sum_blocks(sums))

    def _minibatches(self, purpose: str, epochs: int) -> Iterator[dict[int, Tensor]]:
        sizes = {block: len(rows) for block, rows in self._blocks.items()}
        shuffle = (self.training.seed, purpose, self._iteration)
        return update.minibatches(shuffle, sizes, self.algorithm.num_minibatches, epochs)

    def _rate(self, lr: float) -> float:
        """Returns the decayed learning rate of this iteration."""
        return linear_decay(self._iteration, self.training.num_iterations, lr, self.algorithm.lr_end_fraction)

    def _fit_critic(self) -> dict[str, float]:
        """Runs the epochs of a critic with a separate optimizer, on fixed targets."""
        if VALUE not in self.learners:
            return {}
        self.learners[VALUE].lr = self._rate(self.algorithm.value_lr)
        fitted = self._critic_steps(VALUE, self.algorithm.value_epochs)
        return {"losses/value_loss": fitted.loss, "losses/explained_variance": self._explained_variance()}

    def _critic_steps(self, name: str, epochs: int, only: Collection[str] | None = None) -> Fitted:
        """Steps the critic's own parameters; the features before them are computed once."""
        blocks, policy = self._blocks, self.policy
        if isinstance(policy, HasValueFeatures) and self.training.settings.critic is Critic.observation:
            blocks = {b: replace(t, features=self._value_features(policy, t)) for b, t in blocks.items()}
        passes = partial(self._objective.value_passes, blocks)
        return update.fit(self.learners[name], self._minibatches("value", epochs), passes, only=only)

    def _value_features(self, policy: HasValueFeatures, block: TrainingBlock) -> Features:
        parts = torch.arange(len(block)).split(self.training.block_size)
        found = [policy.value_features({n: t[rows] for n, t in block.features.items()}) for rows in parts if len(rows)]
        return {name: torch.cat([part[name] for part in found]) for name in found[0]} if found else block.features

    def _fit_policy(self) -> dict[str, float]:
        """Runs the policy's epochs, or fewer if a minibatch exceeds the target KL.

        If the same optimizer trains the critic, warm-up and further epochs of the critic step only its own parameters.
        """
        algorithm, learner, iteration = self.algorithm, self.learners[POLICY], self._iteration
        head = self._joint and VALUE_GROUP in learner.rates
        warming_up = algorithm.has_critic and iteration < algorithm.critic_warmup_iterations
        if warming_up and not head:
            return {}
        learner.lr = self._rate(algorithm.lr)
        if head:
            learner.rates[VALUE_GROUP] = self._rate(algorithm.lr if algorithm.one_optimizer else algorithm.value_lr)
        further = 0 if algorithm.one_optimizer else max(0, algorithm.value_epochs - algorithm.epochs)
        if warming_up:
            return self._joint_metrics(self._critic_steps(POLICY, algorithm.epochs + further, (VALUE_GROUP,)))
        counts = torch.zeros(BINS, device=self.training.context.device) if self.training.counts_ratios else None
        self._objective = replace(self._objective, ratio_counts=counts)
        fitted = self._policy_steps()
        if head and further:
            self._critic_steps(POLICY, further, (VALUE_GROUP,))
        metrics = update.policy_metrics(fitted) | {
            "losses/policy_steps": float(len(fitted.norms)),
            "losses/stopped_by_kl": float(fitted.stopped),
            "charts/learning_rate": learner.lr,
        }
        if algorithm.needs_reference:
            metrics["losses/reference_kl"] = fitted.mean(REFERENCE_KL, "actions")
        if algorithm.uses_demonstrations:
            metrics["losses/imitation_loss"] = fitted.mean(IMITATION_LOSS, CHUNKS)
        if counts is not None:
            total = self.training.reducer.group.all_reduce(counts)  # integers, whose sum does not depend on the order
            metrics["losses/log_ratio"] = Histogram(total.tolist(), LARGEST_LOG_RATIO)
            self._objective = replace(self._objective, ratio_counts=None)  # frees device memory
        return metrics | (self._joint_metrics(fitted) if self._joint else {})

    def _joint_metrics(self, fitted: Fitted) -> dict[str, float]:
        explained = self._explained_variance()
        return {"losses/value_loss": fitted.mean(VALUE_LOSS), "losses/explained_variance": explained}

    def _policy_steps(self) -> Fitted:
        blocks, batches = self._blocks, self._minibatches("policy", self.algorithm.epochs)
        if self.algorithm.has_critic and self.algorithm.normalize_advantages is Normalization.minibatch:
            blocks = {b: replace(t, advantages=t.advantages.clone()) for b, t in blocks.items()}
            batches = self._normalized(batches, blocks)
        cloning, learner = self.cloning, self.learners[POLICY]
        if cloning is not None:
            batches = cloning.batches(batches, blocks, self._iteration)

        def passes(rows: Mapping[int, Tensor]) -> list[Pass]:
            loss_passes = self._objective.policy_passes(blocks, rows)
            return loss_passes if cloning is None else loss_passes + cloning.passes(rows, learner.statistics)

        limit = math.inf if self.algorithm.target_kl is None else self.algorithm.target_kl
        stop = lambda step: step.sums["approx_kl"] / max(step.sums["actions"], 1.0) > limit  # noqa: E731
        return update.fit(learner, batches, passes, stop)

    def _normalized(
        self, batches: Iterator[dict[int, Tensor]], blocks: Mapping[int, TrainingBlock]
    ) -> Iterator[dict[int, Tensor]]:
        """Yields minibatches, after standardising the advantages in `blocks` per minibatch, one epoch at a time."""
        while epoch := list(islice(batches, self.algorithm.num_minibatches)):
            order = {b: torch.cat([rows[b] for rows in epoch]) for b in blocks}
            sizes = {b: [len(rows[b]) for rows in epoch] for b in blocks}
            columns = {b: (t.advantages[order[b]], t.valid[order[b]]) for b, t in self._blocks.items()}
            normalized = standardized(columns, self.training.reducer.sum_blocks, correction=1, sizes=sizes)
            for b, advantages in normalized.items():
                blocks[b].advantages[order[b]] = advantages
            yield from epoch

    def _explained_variance(self) -> float:
        columns = {b: (cast(Tensor, t.values), cast(Tensor, t.returns), t.valid) for b, t in self._blocks.items()}
        return explained_variance(columns, self.training.reducer.sum_blocks)

    @torch.no_grad()
    def _score(self, features: Features, record: Record, policy: Policy | None = None) -> Tensor:
        """Returns a policy's log-probs of choices, [B, C, K]; None: those of the worker's copy.

        Calls have the size of a block, since a row's last bits depend on the size of its batch.
        """
        evaluation = (policy or self.policy).evaluate(features, record, self._temperature)
        if evaluation.entropy is None and self.algorithm.entropy_coef:
            raise ConfigError(
                f"algorithm.entropy_coef is {self.algorithm.entropy_coef:g}, but "
                f"{self.training.settings._target_} has no entropy in closed form: use 0"
            )
        return evaluation.log_probs

    def _scored(self, policy: Policy, name: str, rollouts: Rollouts) -> Rollouts:
        """Adds a policy's log-probs of every choice to a block's rollouts, as the column `name`."""
        at = lambda part, h: {name: value[h] for name, value in part.items()}  # noqa: E731
        result = []
        for columns, env in rollouts:
            steps = range(len(columns.log_probs))
            scored = [self._score(at(columns.features, h), at(columns.record, h), policy) for h in steps]
            result.append((replace(columns, **{name: torch.stack(scored)}), env))
        return result

    def _initial_log_ratio(self, step_context: StepContext) -> float:
        """Returns the largest |training log-prob - recorded log-prob| of a choice, before any step of the policy.

        With tis_cap it is over all samples, otherwise over each block's first minibatch with samples.

        Raises:
            ObjectiveError: it exceeds rounding errors although the weights are those that sampled.
        """
        batches = list(self._minibatches("policy", 1))
        first = {b: next((rows[b] for rows in batches if len(rows[b])), batches[0][b]) for b in self._blocks}
        ratios = {b: self._largest_log_ratio(block, first[b]) for b, block in self._blocks.items()}
        largest = float(torch.stack(list(self.training.reducer.gather_blocks(ratios).values())).max())
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
                rows = block.rows(torch.cat([part, part[:1].expand(size - len(part))]))  # padded by its first row
                now = self._score(rows.features, rows.record)
                differences.append((now - rows.old_log_probs)[: len(part)][rows.valid[: len(part)]])
        return torch.cat([part.abs().reshape(-1) for part in differences]).max().reshape(1)


def replicated(policy: Policy, algorithm: OnPolicyConfig, reducer: Reducer) -> tuple[dict[str, Learner], bool]:
    """Returns learners of the worker's copy, and whether the policy's learner also trains the critic.

    It does if the two share parameters, and with algorithm.one_optimizer.
    """
    actor, critic, compile = policy.policy_parameters(), _critic(policy, algorithm), algorithm.compile
    shared = {id(p) for p in actor}
    head = [p for p in critic if id(p) not in shared]
    joint = len(head) < len(critic) or algorithm.one_optimizer
    main, value = _settings(algorithm)
    groups = {VALUE_GROUP: ParameterGroup(head, main if algorithm.one_optimizer else value)} if joint and head else {}
    statistics = (*policy_statistics(algorithm), *([VALUE_LOSS] if joint else []))
    learners = {POLICY: Learner(actor, main, statistics, reducer, more=groups, compile=compile)}
    if critic and not joint:
        learners[VALUE] = Learner(critic, value, VALUE_STATISTICS, reducer, compile=compile)
    return learners, joint


def _critic(policy: Policy, algorithm: OnPolicyConfig) -> Sequence[nn.Parameter]:
    """Returns the parameters that the value loss trains; empty without a value loss."""
    parameters = policy.value_parameters() if algorithm.has_critic else []
    if algorithm.has_critic and not parameters:
        raise ConfigError(
            f"algorithm is {algorithm.name}, but value_parameters() of the policy {policy.spec.name} is empty: it "
            "trains a critic, use algorithm=grpo without one"
        )
    return parameters


def _settings(algorithm: OnPolicyConfig) -> tuple[AdamSettings, AdamSettings]:
    value = adam(algorithm, algorithm.value_lr, algorithm.value_max_grad_norm)
    return adam(algorithm, algorithm.lr, algorithm.max_grad_norm), value
