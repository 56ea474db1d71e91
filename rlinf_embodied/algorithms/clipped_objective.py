"""The losses of a policy and its critic over samples of a block, as sums that are exact over microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Self

import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.log_probs import to_level, weights_at_level
from rlinf_embodied.algorithms.losses import (
    LARGEST_LOG_RATIO,
    importance_weights,
    policy_loss,
    reference_kl,
    value_loss,
)
from rlinf_embodied.algorithms.policy_losses import DPPO, Clipped
from rlinf_embodied.config import AlgorithmConfig, Critic, Level, PolicyLoss, RatioLevel, Sharding, Source, TrainConfig
from rlinf_embodied.config.algorithm import require_dual_clip
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.policies import Evaluation, Features, Record
from rlinf_embodied.learning.gradients import LossSums, Pass, microbatches
from rlinf_embodied.learning.update import POLICY_STATISTICS
from rlinf_embodied.telemetry.boards import Histogram

REFERENCE_KL = "reference_kl"  # a statistic of passes
CLONING_STATISTICS = IMITATION_LOSS, CHUNKS = "imitation_loss", "demonstrated_chunks"  # of passes over demonstrations


class Estimator(StrEnum):
    """How advantages are computed from the episodes of a group."""

    grpo = "grpo"  # (R - mean) / std of the group (arXiv 2402.03300)
    dr_grpo = "dr_grpo"  # R - mean (arXiv 2503.20783)
    rloo = "rloo"  # R minus the mean of the others (arXiv 2402.14740)
    reinforce_pp = "reinforce_pp"  # R - mean, over the standard deviation of all (REINFORCE++ baseline, 2501.03262)


class Normalization(StrEnum):
    """The samples over which PPO's advantages are standardised."""

    batch = "batch"  # all samples of an iteration
    task = "task"  # all samples of a task; tasks differ in their instructions
    minibatch = "minibatch"


@dataclass(kw_only=True, slots=True)
class OnPolicyConfig(AlgorithmConfig):
    """Settings of PPO and GRPO, which share the clipped objective and differ in their advantages."""

    learns_from = Source.rollouts
    # Log-probs are summed up to this level before a ratio is formed, and the clip range is of a ratio at that level:
    # SimpleVLA-RL forms them per token, RLinf-VLA per token, action or chunk, PPO per action, flow policies per chunk,
    # all with 0.2, clip_high up to 0.28.
    ratio_level: Level = Level.action
    loss: PolicyLoss = field(default_factory=Clipped)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # bounds the ratio where the advantage is negative; null: no bound
    kl_coef: float = 0.0  # of the KL (k3) to the policy that the run began with, at the level of the ratio
    bc_coef: float = 0.0  # of the behaviour-cloning loss on demonstrations in every minibatch (docs/warm_start.md) ...
    bc_decay: float = 1.0  # ... times this to the power of the iteration; DAPG (arXiv 1709.10087): 0.95
    bc_batch_size: int = 32  # demonstrated chunks of a minibatch
    epochs: int = 4
    num_minibatches: int = 5  # a minibatch is one slice of every block
    lr: float = 1.5e-4
    adam_eps: float = 1e-5
    lr_end_fraction: float = 0.3  # lr and value_lr decay linearly to this fraction at the last iteration
    max_grad_norm: float = 0.5
    entropy_coef: float = 0.0  # of the entropy of an action, the sum over its choices: losses/entropy
    sharding: Sharding = Sharding.none  # of the policy while it trains; a critic is never sharded
    rows_per_microbatch: int | None = None  # chunks of a pass; None: of a block, on accelerators of a minibatch
    ratio_tolerance: float | None = None  # of |log ratio| before the first step; None: 1e-5 on CPUs in float32
    tis_cap: float | None = None  # truncated importance sampling: largest pi_training / pi_rollout; None: no correction
    target_kl: float | None = 0.05  # per action at every level; policy epochs end when a minibatch exceeds it
    # PPO
    gamma: float = 0.99  # per env step; smaller values favour early over lasting success
    gae_lambda: float = 0.97  # per env step, also where a chunk is one step
    # whether time-outs bootstrap from the value of the final observation, or end the episode like a termination; null:
    # they bootstrap with policy.critic=observation, which does not see the time; a privileged critic does
    bootstrap_at_timeout: bool | None = None
    value_lr: float = 1e-3  # of parameters that only the critic has
    value_epochs: int = 8  # at least `epochs` if critic and policy share parameters, as one pass trains both
    value_max_grad_norm: float = 1.0  # of a separate critic, or of steps of the critic alone
    one_optimizer: bool = False  # of policy and critic, on the sum of both losses, with epochs, lr and max_grad_norm
    value_coef: float = 0.5  # of the value loss in that sum, which is also used if the two share parameters
    # in standard deviations of the return where the policy standardises returns (normalize_returns):
    value_clip: float | None = None  # largest change of a value from that before the update; null: no limit
    huber_delta: float | None = None  # error from which the value loss is linear; null: none
    normalize_advantages: Normalization = Normalization.batch
    critic_warmup_iterations: int = 1  # first iterations, which train only the critic's own parameters
    # GRPO
    group_size: int = 8  # episodes from one initial state
    estimator: Estimator = Estimator.grpo
    success_only: bool = True  # the return of an episode is its success, not its shaped reward
    drop_zero_variance_groups: bool = True  # groups whose episodes have the same return are dropped (DAPO) ...
    max_resamples: int = 2  # ... and replaced by further rollouts, at most this many times
    min_groups: int = 8  # resample until this many groups are left
    length_normalized: bool = True  # all episodes have the same weight, whatever their length

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        counts = ("epochs", "num_minibatches", "group_size", "min_groups", "rows_per_microbatch", "bc_batch_size")
        require_numbers(self, "algorithm", *counts, low=1)
        optional = ("ratio_tolerance", "target_kl", "tis_cap", "value_clip", "huber_delta")
        require_numbers(self, "algorithm", "value_lr", *optional, low=0, above=True)
        others = ("critic_warmup_iterations", "max_resamples", "value_coef", "entropy_coef", "kl_coef", "bc_coef")
        require_numbers(self, "algorithm", "value_epochs", *others, low=0)
        supported = self.sharding is Sharding.none or not (self.compile or self.one_optimizer)
        rule = "a sharded policy is not compiled, and needs a separate optimizer"
        require(supported, "algorithm.sharding", self.sharding.value, rule, "use none")
        rule = "passes over demonstrations are neither compiled nor sharded"
        supports_bc = self.sharding is Sharding.none and not self.compile
        action = "use 0, or algorithm.sharding=none algorithm.compile=false"
        require(supports_bc or not self.bc_coef, "algorithm.bc_coef", self.bc_coef, rule, action)
        require_dual_clip(self.dual_clip, self.loss)
        rule = "torch cannot compile DPPO's check that log-probs are not positive"
        holds = not (self.compile and isinstance(self.loss, DPPO))
        require(holds, "algorithm.compile", self.compile, rule, "use algorithm.compile=false")
        level, rule = self.ratio_level, f"{type(self.loss).__name__} has one ratio per chunk"
        fits = level is Level.chunk or self.loss.level is RatioLevel.token
        require(fits, "algorithm.ratio_level", level.value, rule, "use chunk")
        bounds = ("clip_low", "clip_high", "max_grad_norm", "value_max_grad_norm")  # inf disables it
        require_numbers(self, "algorithm", *bounds, above=True, high=math.inf)
        require_numbers(self, "algorithm", "gamma", "gae_lambda", "lr_end_fraction", "bc_decay", high=1)

    @property
    def needs_reference(self) -> bool:
        """Whether the initial policy scores samples as well."""
        return self.kl_coef > 0 or self.loss.needs_reference

    @property
    def uses_demonstrations(self) -> bool:
        return self.bc_coef > 0

    def without_early_stop(self) -> Self:
        return replace(self, target_kl=None)

    def bootstraps(self, critic: Critic) -> bool:
        setting = self.bootstrap_at_timeout
        return self.has_critic and (critic is Critic.observation if setting is None else setting)

    def check(self, config: TrainConfig) -> None:
        rule, resets = "compiled passes need blocks of constant size, as with resets", config.env.auto_reset
        require(
            resets or not self.compile, "algorithm.compile", self.compile, rule, "set env.auto_reset=true, or false"
        )


Blocks = Mapping[int, TrainingBlock]
_Parts = tuple[tuple[TrainingBlock, Tensor], ...]  # blocks, and the rows of each in a pass


@dataclass(frozen=True, slots=True)
class Objective:
    """The inputs of the losses other than their rows."""

    algorithm: OnPolicyConfig
    temperature: float
    evaluate: Callable[[Features, Record, float, bool], Evaluation]  # see Policy.evaluate
    value: Callable[[Features, Tensor | None], Tensor]  # see Policy.value
    joint: bool  # whether passes of the policy also train the critic
    return_scale: Callable[[], Tensor] | None = None  # the unit of the critic's loss; None: 1
    ratio_counts: Tensor | None = None  # float32 [BINS], counts of log ratios that passes of the policy add to

    def policy_passes(self, blocks: Blocks, rows: Mapping[int, Tensor]) -> list[Pass]:
        """Returns microbatches of the policy's loss (and a joint critic's) over rows of blocks, computed later."""
        return [
            Pass(float(sum(block.weights[index].sum() for block, index in parts)), partial(self._policy_sums, parts))
            for parts in self._microbatches(blocks, rows)
        ]

    def value_passes(self, blocks: Blocks, rows: Mapping[int, Tensor]) -> list[Pass]:
        """Returns microbatches of the critic's loss alone."""
        return [
            Pass(float(sum(block.valid[index].sum() for block, index in parts)), partial(self._value_sums, parts))
            for parts in self._microbatches(blocks, rows)
        ]

    def _microbatches(self, blocks: Blocks, rows: Mapping[int, Tensor]) -> list[_Parts]:
        cut = microbatches(rows, self.algorithm.rows_per_microbatch)
        return [tuple((blocks[block], index) for block, index in part.items()) for part in cut]

    def _policy_sums(self, parts: _Parts) -> LossSums:
        rows = TrainingBlock.concatenate([block.rows(index) for block, index in parts])
        algorithm, level, valid = self.algorithm, self.algorithm.ratio_level, rows.valid
        evaluation = self.evaluate(rows.features, rows.record, self.temperature, algorithm.entropy_coef != 0)
        choices, counted = evaluation.log_probs.shape[-1], rows.weights > 0
        now, old = to_level(evaluation.log_probs, valid, level), to_level(rows.old_log_probs, valid, level)
        weights = weights_at_level(rows.weights, level, choices)
        mask = weights > 0
        if self.ratio_counts is not None:
            self.ratio_counts.add_(Histogram.count((now - old).detach()[mask], LARGEST_LOG_RATIO))
        importance = None  # no correction for the sampling policy
        if algorithm.tis_cap is not None:
            assert rows.rollout_log_probs is not None, "with a cap all samples are rescored first"
            recorded = to_level(rows.rollout_log_probs, valid, level)
            importance, _ = importance_weights(old, recorded, mask, algorithm.tis_cap)
        reference = rows.reference_log_probs
        reference = None if reference is None else to_level(reference, valid, level)
        terms = policy_loss(
            now,
            old,
            rows.advantages[:, 0] if level is Level.chunk else rows.advantages,
            mask,
            algorithm.clip_low,
            algorithm.clip_high,
            weights,
            importance,
            loss=algorithm.loss,
            dual_clip=algorithm.dual_clip,
            length=(valid.sum(-1) * choices).clamp(min=1) if algorithm.loss.level is RatioLevel.geometric else None,
            reference=reference,
        )
        entropy = torch.zeros_like(rows.weights) if evaluation.entropy is None else evaluation.entropy.sum(-1)
        loss = terms.loss
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (rows.weights * entropy).sum()
        entropies = torch.where(counted, entropy, 0.0).sum()
        statistics = [terms.loss, terms.approx_kl, terms.clipped, terms.count, entropies, counted.sum()]
        if reference is not None:
            kl = weights * reference_kl(now, reference, mask)
            loss = loss + algorithm.kl_coef * kl.sum()
            statistics.append(kl.sum())
        if algorithm.uses_demonstrations:  # filled by the passes over demonstrations
            statistics += [torch.zeros_like(loss)] * len(CLONING_STATISTICS)
        if self.joint:
            values = evaluation.values if evaluation.values is not None else self.value(rows.features, rows.privileged)
            value = self._value_loss(rows, values)
            loss = algorithm.value_coef * value + loss
            statistics.append(value)
        return LossSums(loss, terms.weight, torch.stack([s.detach().to(torch.float32) for s in statistics]))

    def _value_sums(self, parts: _Parts) -> LossSums:
        rows = TrainingBlock.concatenate([block.rows(index) for block, index in parts])
        loss = self._value_loss(rows, self.value(rows.features, rows.privileged))
        statistics = loss.detach().reshape(1)
        if self.joint:  # same layout as that of joint passes
            loss = self.algorithm.value_coef * loss
            statistics = torch.cat([statistics.new_zeros(len(policy_statistics(self.algorithm))), statistics])
        return LossSums(loss, rows.valid.sum().to(torch.float32), statistics)

    def _value_loss(self, rows: TrainingBlock, values: Tensor) -> Tensor:
        """Returns the critic's loss in units of `return_scale`.

        value_coef and a joint gradient norm then have the same effect for every scale of rewards.
        """
        clip, delta, old, returns = self.algorithm.value_clip, self.algorithm.huber_delta, rows.values, rows.returns
        assert returns is not None
        if self.return_scale is not None:
            unit = self.return_scale()
            values, returns, old = values / unit, returns / unit, None if old is None else old / unit
        return value_loss(values, returns, rows.valid, old, clip=clip, huber_delta=delta)


def policy_statistics(algorithm: OnPolicyConfig) -> tuple[str, ...]:
    """Returns the names of the statistics of the policy's passes, without a joint critic's."""
    reference = (REFERENCE_KL,) if algorithm.needs_reference else ()
    return (*POLICY_STATISTICS, *reference, *(CLONING_STATISTICS if algorithm.uses_demonstrations else ()))
