"""The losses of a policy and its critic over samples of a block, as sums: blocks and microbatches add up exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlinf_embodied.algorithms.log_probs import mask_at_level, to_level, weights_at_level
from rlinf_embodied.algorithms.losses import masked_sum, policy_loss, value_loss
from rlinf_embodied.algorithms.off_policy import truncated_importance_weights
from rlinf_embodied.config import AlgorithmConfig, Level
from rlinf_embodied.embodied.batch import TrainingBlock
from rlinf_embodied.interfaces.policies import Evaluation, Features, Record
from rlinf_embodied.learning.gradients import LossSums, Pass


@dataclass(frozen=True, slots=True)
class Objective:
    """What the losses are made of beside their rows."""

    algorithm: AlgorithmConfig
    temperature: float
    evaluate: Callable[[Features, Record, float, bool], Evaluation]  # see Policy.evaluate
    value: Callable[[Features, Tensor | None], Tensor]  # see Policy.value
    joint: bool  # whether a pass of the policy trains the critic, too

    def policy_passes(self, rows: TrainingBlock, critic_only: bool) -> list[Pass]:
        """Returns microbatches of the policy's loss, none of them computed yet; or of its joint critic's alone."""
        size = self.algorithm.rows_per_microbatch or len(rows)
        parts = [rows.rows(index) for index in torch.arange(len(rows)).split(size)] if size < len(rows) else [rows]
        return [Pass(float(part.weights.sum()), partial(self._policy_sums, part, critic_only)) for part in parts]

    def value_passes(self, rows: TrainingBlock) -> list[Pass]:
        """Returns the pass of a critic of its own."""
        return [Pass(float(rows.valid.sum()), partial(self._value_sums, rows))]

    def _policy_sums(self, rows: TrainingBlock, critic_only: bool) -> LossSums:
        algorithm, level = self.algorithm, self.algorithm.ratio_level
        found = self.evaluate(rows.features, rows.record, self.temperature, algorithm.entropy_coef != 0)
        choices = found.log_probs.shape[-1]
        counted = rows.weights > 0
        mask = mask_at_level(counted, level, choices, rows.mask)
        terms = policy_loss(
            to_level(found.log_probs, rows.valid, level, rows.mask),
            to_level(rows.old_log_probs, rows.valid, level, rows.mask),
            rows.advantages[:, 0] if level is Level.chunk else rows.advantages,
            mask,
            algorithm.clip_low,
            algorithm.clip_high,
            weights_at_level(rows.weights, level, choices, rows.mask),
            dual_clip=algorithm.dual_clip,
            max_log_ratio=algorithm.max_log_ratio,
            importance=self._importance(rows, mask),
        )
        per_action = torch.zeros_like(rows.weights) if found.entropy is None else found.entropy.sum(-1)
        loss = terms.loss
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (rows.weights * per_action).sum()
        kl, count = terms.approx_kl
        outside, _ = terms.clipfrac
        statistics = [terms.loss, kl, outside, count, masked_sum(per_action, counted) / choices, counted.sum()]
        if self.joint:
            value = self._joint_value_loss(rows, found)
            loss = algorithm.value_coef * value + (0.0 if critic_only else loss)
            statistics.append(value)
        return LossSums(loss, terms.weight, torch.stack([s.detach().to(torch.float32) for s in statistics]))

    def _importance(self, rows: TrainingBlock, mask: Tensor) -> Tensor | None:
        """Returns what corrects each entry of the ratio for the sampler; None where nothing does."""
        if self.algorithm.tis_cap is None:
            return None
        assert rows.rollout_log_probs is not None, "with a cap everything is scored again first"
        level = self.algorithm.ratio_level
        old = to_level(rows.old_log_probs, rows.valid, level, rows.mask)
        recorded = to_level(rows.rollout_log_probs, rows.valid, level, rows.mask)
        return truncated_importance_weights(old, recorded, mask, self.algorithm.tis_cap)

    def _joint_value_loss(self, rows: TrainingBlock, found: Evaluation) -> Tensor:
        """Returns the critic's summed loss, from the forward pass of the policy where that gives values."""
        assert rows.returns is not None
        values = found.values if found.values is not None else self.value(rows.features, rows.privileged)
        return value_loss(values, rows.returns, rows.valid, rows.values, self.algorithm.value_clip).loss

    def _value_sums(self, rows: TrainingBlock) -> LossSums:
        assert rows.returns is not None
        values = self.value(rows.features, rows.privileged)
        terms = value_loss(values, rows.returns, rows.valid, rows.values, self.algorithm.value_clip)
        return LossSums(terms.loss, terms.count.to(torch.float32), terms.loss.detach().reshape(1))
