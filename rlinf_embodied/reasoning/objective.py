"""The policy's loss over a microbatch of completions, as sums: blocks and microbatches add up exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_embodied.algorithms.losses import policy_loss, reference_kl
from rlinf_embodied.algorithms.off_policy import mismatch, truncated_token_weights
from rlinf_embodied.config import LossLevel, ReasoningAlgorithmConfig
from rlinf_embodied.interfaces import LanguagePolicy, TokenBatch
from rlinf_embodied.learning.update import LossSums
from rlinf_embodied.reasoning.packing import microbatches
from rlinf_embodied.reasoning.training_rows import TrainingRows

# what is summed beside the loss: over sequences' tokens, where nothing else is said
STATISTICS = (
    "loss",
    "weight",
    "approx_kl",
    "clipped",
    "tokens",
    "entropy",
    "mismatch",
    "mismatch_kl",
    "ratio",
    "capped",
    "kl",
)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a loss is made of beside its rows."""

    policy: LanguagePolicy
    algorithm: ReasoningAlgorithmConfig
    temperature: float
    max_new_tokens: int
    largest: dict[int, Tensor]  # by block, filled: largest |pi_old - generation|, |pi - pi_old| of a token, logarithms

    def parts(self, block: int, rows: TrainingRows, index: Tensor, device: str) -> Iterator[LossSums]:
        """Yields the sums of each microbatch of some rows of a block."""
        chosen = index.tolist()
        sequences, pad_id = rows.sequences.select(chosen), self.policy.spec.pad_id
        for numbers, batch in microbatches(sequences, self.algorithm.tokens_per_microbatch, pad_id, device):
            yield self._sums(block, rows, [chosen[number] for number in numbers], batch)

    def _sums(self, block: int, rows: TrainingRows, index: Sequence[int], batch: TokenBatch) -> LossSums:
        algorithm, mask = self.algorithm, batch.mask
        width = mask.shape[1]
        cut = lambda table: table[list(index), :width].to(mask.device)  # noqa: E731
        found = self.policy.log_probs(batch, self.temperature)
        assert found.entropy is not None
        log_probs, behaviour = found.log_probs, cut(rows.behaviour)
        # with one step per iteration the weights are those that sampled: the ratio is 1, and this pass says pi_old
        old = log_probs.detach() if rows.proximal is None else cut(rows.proximal)
        weights, weight = self._weights(batch, mask)
        corrected = weights
        if algorithm.importance_cap is not None:
            corrected = weights * truncated_token_weights(old, behaviour, mask, algorithm.importance_cap)
        terms = policy_loss(
            log_probs, old, cut(rows.advantages), mask, algorithm.clip_low, algorithm.clip_high, corrected
        )
        loss = terms.loss - algorithm.entropy_coef * (weights * found.entropy).sum()
        kl = torch.zeros_like(log_probs)
        if rows.reference is not None:
            kl = reference_kl(log_probs, cut(rows.reference), mask)
            loss = loss + algorithm.kl_coef * (weights * kl).sum()
        apart = mismatch(old, behaviour + cut(rows.log_mass), mask)
        differences = torch.stack([apart.abs_max.float(), terms.max_abs_log_ratio.detach()]).cpu()
        self.largest[block] = torch.maximum(self.largest.get(block, torch.zeros(2)), differences)
        capped = (mask & (old - behaviour > _log(algorithm.importance_cap))).sum()
        statistics = [
            *(terms.loss, weight, terms.approx_kl[0], terms.clipfrac[0], terms.clipfrac[1]),
            (found.entropy * mask).sum(),
            *(apart.abs_sum, apart.kl_sum, apart.ratio_sum, capped, kl.sum()),
        ]
        return LossSums(loss, weight, torch.stack([s.detach().to(torch.float32).reshape(()) for s in statistics]))

    def _weights(self, batch: TokenBatch, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weight of each token [B, R], and what the microbatch adds to the loss's denominator."""
        number = mask.new_tensor(float(len(mask)), dtype=torch.float32)
        if self.algorithm.loss_level is LossLevel.sequence:
            counts = (batch.lengths - batch.prompt_lengths)[:, None].clamp(min=1)
            return mask.to(torch.float32) / counts, number
        if self.algorithm.loss_level is LossLevel.constant:
            return mask.to(torch.float32), number * self.max_new_tokens
        return mask.to(torch.float32), mask.sum().to(torch.float32)


def _log(cap: float | None) -> float:
    return float("inf") if cap is None else float(torch.tensor(cap).log())
