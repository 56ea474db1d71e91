"""The policy's loss over a microbatch of completions, as sums: blocks and microbatches add up exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlinf_embodied.algorithms.losses import policy_loss, reference_kl
from rlinf_embodied.algorithms.off_policy import mismatch, truncated_token_weights
from rlinf_embodied.config import LossLevel, ReasoningAlgorithmConfig
from rlinf_embodied.interfaces import LanguagePolicy, TokenBatch
from rlinf_embodied.learning.learner import Pass
from rlinf_embodied.learning.update import LossSums
from rlinf_embodied.reasoning.packing import pack
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

    def passes(self, block: int, rows: TrainingRows, index: Tensor, device: str) -> list[Pass]:
        """Returns the microbatches of some rows of a block, none of them computed yet.

        Rows that pull the policy nowhere are not passed through it; they count in the loss's denominator (the first
        pass adds them), as long as there is another row to count with.
        """
        every = index.tolist()
        chosen = self._pulling(rows, every) or every[:1]
        idle = self._weight(rows, every) - self._weight(rows, chosen)
        made = []
        for numbers in pack(rows.sequences.select(chosen).lengths(), self.algorithm.tokens_per_microbatch):
            places, extra = [chosen[number] for number in numbers], 0.0 if made else idle
            run = partial(self._sums, block, rows, places, device, extra)
            made.append(Pass(self._weight(rows, places) + extra, run))
        return made

    def _pulling(self, rows: TrainingRows, index: Sequence[int]) -> list[int]:
        """Returns the rows whose loss has a gradient."""
        if self.algorithm.entropy_coef or self.algorithm.kl_coef:
            return list(index)
        moved = (rows.advantages != 0).any(dim=1).tolist()
        return [row for row in index if moved[row]]

    def _sums(self, block: int, rows: TrainingRows, index: Sequence[int], device: str, idle: float) -> LossSums:
        batch = rows.sequences.batch(index, self.policy.spec.pad_id).to(device)
        algorithm, mask = self.algorithm, batch.mask
        width = mask.shape[1]
        cut = lambda table: table[list(index), :width].to(mask.device)  # noqa: E731
        found = self.policy.log_probs(batch, self.temperature)
        assert found.entropy is not None
        log_probs, behaviour = found.log_probs, cut(rows.behaviour)
        # with one step per iteration the weights are those that sampled: the ratio is 1, and this pass says pi_old
        old = log_probs.detach() if rows.proximal is None else cut(rows.proximal)
        weights = self._weights(batch, mask)
        weight = mask.new_tensor(self._weight(rows, index) + idle, dtype=torch.float32)
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

    def _weights(self, batch: TokenBatch, mask: Tensor) -> Tensor:
        """Returns the weight of each token in the loss, [B, R]."""
        if self.algorithm.loss_level is LossLevel.sequence:
            counts = (batch.lengths - batch.prompt_lengths)[:, None].clamp(min=1)
            return mask.to(torch.float32) / counts
        return mask.to(torch.float32)

    def _weight(self, rows: TrainingRows, index: Sequence[int]) -> float:
        """Returns what some rows add to the loss's denominator."""
        if self.algorithm.loss_level is LossLevel.sequence:
            return float(len(index))
        if self.algorithm.loss_level is LossLevel.constant:
            return float(len(index) * self.max_new_tokens)
        return float(sum(len(rows.sequences.completions[row]) for row in index))


def idle_loss(policy: LanguagePolicy, device: str) -> Tensor:
    """Returns 0 from a forward pass over two tokens: for a worker that takes part in a pass of others."""
    token = policy.spec.eos_ids[0]
    batch = TokenBatch(torch.tensor([[token, token]]), torch.tensor([1]), torch.tensor([2])).to(device)
    return policy.log_probs(batch, 1.0, with_entropy=False).log_probs.sum() * 0.0


def _log(cap: float | None) -> float:
    return float("inf") if cap is None else float(torch.tensor(cap).log())
