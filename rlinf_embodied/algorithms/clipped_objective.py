"""The losses of a policy and its critic over samples of a block, as sums: blocks and microbatches add up exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.log_probs import to_level, weights_at_level
from rlinf_embodied.algorithms.losses import policy_loss, truncated_importance_weights, value_loss
from rlinf_embodied.config import Level, OnPolicyConfig
from rlinf_embodied.interfaces.policies import Evaluation, Features, Record
from rlinf_embodied.learning.gradients import LossSums, Pass


@dataclass(frozen=True, slots=True)
class Objective:
    """The inputs of the losses other than their rows."""

    algorithm: OnPolicyConfig
    temperature: float
    evaluate: Callable[[Features, Record, float, bool], Evaluation]  # see Policy.evaluate
    value: Callable[[Features, Tensor | None], Tensor]  # see Policy.value
    joint: bool  # whether a pass of the policy trains the critic, too

    def policy_passes(self, block: TrainingBlock, index: Tensor, critic_only: bool) -> list[Pass]:
        """Returns microbatches of the policy's loss over rows `index`, none computed yet; or of its joint critic's."""
        return [
            Pass(float(block.weights[part].sum()), partial(self._policy_sums, block, part, critic_only))
            for part in index.split(self.algorithm.rows_per_microbatch or len(index))
        ]

    def value_passes(self, block: TrainingBlock, index: Tensor) -> list[Pass]:
        """Returns the pass of a separate critic."""
        return [Pass(float(block.valid[index].sum()), partial(self._value_sums, block, index))]

    def _policy_sums(self, block: TrainingBlock, index: Tensor, critic_only: bool) -> LossSums:
        rows = block.rows(index)
        algorithm, level = self.algorithm, self.algorithm.ratio_level
        found = self.evaluate(rows.features, rows.record, self.temperature, algorithm.entropy_coef != 0)
        choices, counted = found.log_probs.shape[-1], rows.weights > 0
        old, weights = to_level(rows.old_log_probs, rows.valid, level), weights_at_level(rows.weights, level, choices)
        mask = weights > 0
        importance = None  # nothing corrects for the sampler
        if algorithm.tis_cap is not None:
            assert rows.rollout_log_probs is not None, "with a cap everything is scored again first"
            recorded = to_level(rows.rollout_log_probs, rows.valid, level)
            importance = truncated_importance_weights(old, recorded, mask, algorithm.tis_cap)
        terms = policy_loss(
            to_level(found.log_probs, rows.valid, level),
            old,
            rows.advantages[:, 0] if level is Level.chunk else rows.advantages,
            mask,
            algorithm.clip_low,
            algorithm.clip_high,
            weights,
            importance,
        )
        entropy = torch.zeros_like(rows.weights) if found.entropy is None else found.entropy.sum(-1)
        loss = terms.loss
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (rows.weights * entropy).sum()
        mean_entropy = torch.where(counted, entropy, 0.0).sum() / choices
        statistics = [terms.loss, terms.approx_kl, terms.clipped, terms.count, mean_entropy, counted.sum()]
        if self.joint:
            assert rows.returns is not None
            values = found.values if found.values is not None else self.value(rows.features, rows.privileged)
            value = value_loss(values, rows.returns, rows.valid)
            loss = algorithm.value_coef * value + (0.0 if critic_only else loss)
            statistics.append(value)
        return LossSums(loss, terms.weight, torch.stack([s.detach().to(torch.float32) for s in statistics]))

    def _value_sums(self, block: TrainingBlock, index: Tensor) -> LossSums:
        rows = block.rows(index)
        assert rows.returns is not None
        loss = value_loss(self.value(rows.features, rows.privileged), rows.returns, rows.valid)
        return LossSums(loss, rows.valid.sum().to(torch.float32), loss.detach().reshape(1))
