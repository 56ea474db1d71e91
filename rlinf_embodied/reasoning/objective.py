"""The actor's data and loss: the completions of a block with their advantages, and the policy's loss.

The loss is computed in microbatches, as sums, so that microbatches and blocks add up exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rlinf_embodied.algorithms.advantages import group_advantages, leave_one_out_advantages, nonzero_variance_groups
from rlinf_embodied.algorithms.losses import (
    LARGEST_LOG_RATIO,
    PolicySums,
    importance_weights,
    mismatch,
    policy_loss,
    reference_kl,
)
from rlinf_embodied.config import LossLevel, Precision, RatioLevel, ReasoningAlgorithmConfig, ReasoningName
from rlinf_embodied.device import computing
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.update import POLICY_STATISTICS
from rlinf_embodied.reasoning.batch import Completions, LogProbs, Rewards, dynamic_batches
from rlinf_embodied.telemetry.boards import Histogram

# summed in addition to the loss, over all sampled tokens
STATISTICS = (*POLICY_STATISTICS, "mismatch", "mismatch_kl", "ratio", "capped", "kl")
_MAX_OBSERVED = 8  # rows without a gradient that are evaluated for metrics, of a block and minibatch


# ---------------------------------------------------------------------------------------------------------------- rows
@dataclass(frozen=True, slots=True)
class Round:
    """Outputs of the stages before the actor for a block in one round; None: the workflow has no such stage."""

    generation: Completions
    reward: Rewards
    old_log_probs: LogProbs | None = None
    reference: LogProbs | None = None
    critic: Tensor | None = None  # advantages, float32 [K x G, R]


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """B completions, trained rows first; tables are float32 [B, R], with arbitrary values after the end of a row."""

    sequences: TokenBatch
    rollout_log_probs: Tensor  # recorded by generation
    advantages: Tensor
    num_trained: int  # the following rows contribute to metrics only
    num_groups: int  # groups in which a trained row has a nonzero advantage
    old_log_probs: Tensor | None = None
    reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)


def training_rows(
    rounds: Sequence[Round], algorithm: ReasoningAlgorithmConfig, kept: Collection[tuple[int, int]] | None
) -> TrainingRows:
    """Returns all completions of a block's rounds; trained ones come first, in the order of rounds and groups.

    `kept` are the (round, index within the block) of the groups to train on.  None: all groups, or those with nonzero
    variance if the algorithm drops the others.
    """
    sequences = _join([one.generation.rows for one in rounds])
    tables = _tables(rounds, algorithm, sequences.mask.shape[1])
    drops = kept is None and algorithm.name is not ReasoningName.ppo and algorithm.drop_zero_variance_groups
    groups, first = dict[tuple[int, int], list[int]](), 0  # rows to train on, by (round, group)
    for number, one in enumerate(rounds):
        completions, has_variance = one.generation, nonzero_variance_groups(one.reward.raw).tolist()
        groups |= {(number, k): [] for k, varies in enumerate(has_variance) if varies or not drops}
        for row, (sample, ended) in enumerate(zip(completions.samples, completions.ended.tolist(), strict=True), first):
            key = number, sample // completions.group_size
            if key in groups and (ended or not algorithm.mask_truncated):
                groups[key].append(row)
        first += len(completions.samples)
    trained_groups = [groups[key] for key in (groups if kept is None else sorted(kept, key=lambda key: key[0]))]
    trained = [row for group in trained_groups for row in group]
    has_advantage = (tables["advantages"] != 0).any(dim=1).tolist()
    num_groups = sum(any(has_advantage[row] for row in group) for group in trained_groups)
    order = trained + sorted(set(range(len(sequences))) - set(trained))
    tables = {name: table[order] for name, table in tables.items()}
    return TrainingRows(sequences.select(order), num_trained=len(trained), num_groups=num_groups, **tables)


def _tables(rounds: Sequence[Round], algorithm: ReasoningAlgorithmConfig, width: int) -> dict[str, Tensor]:
    """Returns the tables of TrainingRows that the workflow has, of all completions in order."""
    tables = {
        "rollout_log_probs": _stacked([one.generation.log_probs for one in rounds], width),
        "advantages": _stacked([_advantages(one, algorithm, width) for one in rounds], width),
    }
    for name in ("old_log_probs", "reference"):
        log_probs = [output.log_probs for one in rounds if (output := getattr(one, name)) is not None]
        if log_probs and log_probs[0] is not None:
            tables[name] = _stacked(log_probs, width)
    return tables


def _join(parts: Sequence[TokenBatch]) -> TokenBatch:
    given = [torch.zeros_like(part.mask) if part.given is None else part.given for part in parts]
    sizes = [
        torch.zeros_like(part.mask, dtype=torch.int32) if part.support is None else part.support[0] for part in parts
    ]
    ids = [part.support[1] for part in parts if part.support is not None]
    return TokenBatch(
        _stacked([part.tokens for part in parts], max(part.tokens.shape[1] for part in parts)),
        torch.cat([part.prompt_lengths for part in parts]),
        torch.cat([part.lengths for part in parts]),
        None if all(part.given is None for part in parts) else _stacked(given, max(table.shape[1] for table in given)),
        (_stacked(sizes, max(table.shape[1] for table in sizes)), torch.cat(ids)) if ids else None,
    )


def _stacked(tables: Sequence[Tensor], width: int) -> Tensor:
    """Returns the rows of all tables, padded with zeros or cut off at `width` columns."""
    return torch.cat([F.pad(table, (0, width - table.shape[1])) for table in tables])


def _advantages(one: Round, algorithm: ReasoningAlgorithmConfig, width: int) -> Tensor:
    """Returns the advantages of all completions of a round, [K x G, R]."""
    if one.critic is not None:
        return one.critic
    if algorithm.name is ReasoningName.rloo:
        advantages = leave_one_out_advantages(one.reward.rewards)
    else:
        advantages = group_advantages(one.reward.rewards, scale_by_std=algorithm.scale_by_std)
    return advantages.flatten()[list(one.generation.samples)][:, None].expand(-1, width)


# ---------------------------------------------------------------------------------------------------------------- loss
@dataclass(frozen=True, slots=True)
class Objective:
    """The inputs of a loss other than its rows."""

    policy: LanguagePolicy
    algorithm: ReasoningAlgorithmConfig
    temperature: float
    max_new_tokens: int
    # filled by passes, by block: largest |log pi_old - log pi_generation| and |log pi - log pi_old| of a token
    largest: dict[int, Tensor]
    ratio_counts: Tensor | None = None  # float32 [BINS], filled by passes: histogram of the tokens' log ratios

    def passes(self, block: int, rows: TrainingRows, index: Tensor, device: str) -> list[Pass]:
        """Returns the microbatches of some rows of a block, not computed yet.

        Rows without a gradient count in the loss's denominator if they are part of the loss.  For the metrics only a
        few of them are evaluated, each of which represents several.
        """
        indices, has_advantage = index.tolist(), (rows.advantages != 0).any(dim=1).tolist()
        lengths = rows.sequences.lengths.tolist()
        algorithm = self.algorithm
        regularised = bool(algorithm.entropy_coef or algorithm.kl_coef) or algorithm.loss.regularizes
        trained = [row for row in indices if row < rows.num_trained and (regularised or has_advantage[row])]
        without_gradient = sorted(set(indices) - set(trained))
        observed = without_gradient[:: max(1, -(-len(without_gradient) // _MAX_OBSERVED))]
        skipped_weight = self._weight(rows, sorted(set(without_gradient) - set(observed)))
        passes = []
        for subset, trains in ((trained, True), (observed, False)):
            scale = 1.0 if trains else len(without_gradient) / max(1, len(observed))
            for batch in dynamic_batches(lengths, algorithm.tokens_per_microbatch, self.policy.packs, subset):
                weight = self._weight(rows, batch) + skipped_weight
                passes.append(Pass(weight, partial(self._sums, block, rows, batch, device, weight, scale), trains))
                skipped_weight = 0.0  # the first pass has counted it
        return passes

    def _sums(
        self, block: int, rows: TrainingRows, index: Sequence[int], device: str, weight: float, scale: float
    ) -> LossSums:
        """Computes a pass; each of its rows represents `scale` rows in the statistics."""
        batch = rows.sequences.select(index).to(device)
        algorithm, mask = self.algorithm, batch.mask
        width = mask.shape[1]
        cut = lambda table: table[list(index), :width].to(mask.device)  # noqa: E731
        with computing(algorithm.precision, device):
            output = self.policy.log_probs(batch, self.temperature, entropy_gradient=algorithm.entropy_coef != 0)
        log_probs, entropy, recorded = output.log_probs, output.entropy, cut(rows.rollout_log_probs)
        assert entropy is not None
        # with one step per iteration the weights are those that sampled: this pass computes pi_old, and the ratio is 1
        old = log_probs.detach() if rows.old_log_probs is None else cut(rows.old_log_probs)
        # of each token in the loss; 0 in rows that are not trained on
        weights = (mask & torch.tensor([row < rows.num_trained for row in index], device=mask.device)[:, None]).float()
        if algorithm.loss_level is LossLevel.sequence:
            weights = weights / mask.sum(-1, keepdim=True).clamp(min=1)
        if self.ratio_counts is not None:
            self.ratio_counts.add_(Histogram.count((log_probs - old).detach()[weights > 0], LARGEST_LOG_RATIO))
        importance, outside = None, torch.zeros_like(mask)
        if algorithm.tis_cap is not None:
            bounds = {"floor": algorithm.tis_floor, "level": algorithm.tis_level, "masks": algorithm.tis_masks}
            importance, outside = importance_weights(old, recorded, mask, algorithm.tis_cap, **bounds)
        reference = None if rows.reference is None else cut(rows.reference)
        terms = self._policy_loss(log_probs, old, cut(rows.advantages), mask, weights, importance, reference)
        loss = terms.loss
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (weights * entropy).sum()
        kl = torch.zeros_like(log_probs)
        if reference is not None:
            kl = reference_kl(log_probs, reference, mask)
            loss = loss + algorithm.kl_coef * (weights * kl).sum()
        distance, largest, mismatch_kl, ratios = mismatch(old, recorded, mask)
        largest_ratio = torch.where(mask, log_probs.detach() - old, 0.0).abs().max()
        differences = torch.stack([largest.float(), largest_ratio]).cpu()
        self.largest[block] = torch.maximum(self.largest.get(block, torch.zeros(2)), differences)
        statistics = [
            *(terms.loss, terms.approx_kl, terms.clipped, terms.count),
            *((entropy * mask).sum(), mask.sum()),
            *(distance, mismatch_kl, ratios, (mask & outside).sum(), kl.sum()),
        ]
        sums = torch.stack([s.detach().to(torch.float32).reshape(()) for s in statistics])
        return LossSums(loss, mask.new_tensor(weight, dtype=torch.float32), sums * scale)

    def _policy_loss(
        self,
        log_probs: Tensor,
        old: Tensor,
        advantages: Tensor,
        mask: Tensor,
        weights: Tensor,
        importance: Tensor | None,
        reference: Tensor | None,
    ) -> PolicySums:
        """Returns the policy's loss over tokens, [B, R], or over whole completions if the loss is of that level."""
        algorithm, length, level = self.algorithm, None, self.algorithm.loss.level
        if level is not RatioLevel.token:  # one ratio and one advantage per completion
            total = lambda table: torch.where(mask, table, 0.0).sum(-1)  # noqa: E731
            length = mask.sum(-1).clamp(min=1)
            importance = None if importance is None else total(importance) / length
            reference = None if reference is None else total(reference)
            log_probs, old, weights, advantages = total(log_probs), total(old), total(weights), advantages[:, 0]
        return policy_loss(
            *(log_probs, old, advantages, mask if length is None else mask.any(-1)),
            *(algorithm.clip_low, algorithm.clip_high, weights, importance),
            loss=algorithm.loss,
            dual_clip=algorithm.dual_clip,
            length=length if level is RatioLevel.geometric else None,
            reference=reference,
        )

    def _weight(self, rows: TrainingRows, index: Sequence[int]) -> float:
        """Returns the contribution of rows to the loss's denominator."""
        counted = [row for row in index if row < rows.num_trained]
        if self.algorithm.loss_level is LossLevel.sequence:
            return float(len(counted))
        if self.algorithm.loss_level is LossLevel.constant:
            return float(len(counted) * self.max_new_tokens)
        return float(rows.sequences.mask[counted].sum())


def zero_loss(policy: LanguagePolicy, device: str, precision: Precision = Precision.float32) -> Tensor:
    """Returns a loss of 0 from a forward pass over two tokens, with which a worker joins a collective pass."""
    token = policy.spec.eos_ids[0]
    batch = TokenBatch(torch.tensor([[token, token]]), torch.tensor([1]), torch.tensor([2])).to(device)
    with computing(precision, device):
        return policy.log_probs(batch, 1.0, with_entropy=False).log_probs.sum() * 0.0
