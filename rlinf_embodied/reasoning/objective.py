"""What an actor trains on: the completions of a block with their advantages, and the policy's loss over them.

The loss comes in microbatches, as sums: blocks and microbatches add up exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_embodied.algorithms.advantages import group_advantages, leave_one_out_advantages, nonzero_variance_groups
from rlinf_embodied.algorithms.losses import (
    LARGEST_LOG_RATIO,
    mismatch,
    policy_loss,
    reference_kl,
    truncated_importance_weights,
)
from rlinf_embodied.config import LossLevel, Precision, ReasoningAlgorithmConfig, ReasoningName
from rlinf_embodied.device import computing
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.update import POLICY_STATISTICS
from rlinf_embodied.reasoning.batch import Completions, LogProbs, Rewards, dynamic_batches
from rlinf_embodied.telemetry.boards import Histogram

# summed in addition to the loss, over all sampled tokens
STATISTICS = (*POLICY_STATISTICS, "mismatch", "mismatch_kl", "ratio", "capped", "kl")
_TABLES = ("rollout_log_probs", "advantages", "old_log_probs", "reference")
_WATCHED = 8  # rows without a gradient of a block and minibatch that are read for the metrics, at most


# ---------------------------------------------------------------------------------------------------------------- rows
@dataclass(frozen=True, slots=True)
class Round:
    """What each stage before the actor made of a block in one round, by the stage's name; None: there is none."""

    generation: Completions
    reward: Rewards
    old_log_probs: LogProbs | None = None
    reference: LogProbs | None = None
    critic: Tensor | None = None  # advantages, float32 [K x G, R]


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """B completions, those that are trained on first; tables are float32 [B, R], anything behind a row's length."""

    sequences: TokenBatch
    rollout_log_probs: Tensor  # as generation recorded them
    advantages: Tensor
    old_log_probs: Tensor | None
    reference: Tensor | None
    num_trained: int  # the rows behind are looked at only: metrics are of all that was sampled
    num_groups: int  # with a completion that is trained on and has an advantage

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> TrainingRows:
        """Returns the rows of which `asdict` gave these fields."""
        return cls(**{**fields, "sequences": TokenBatch(**fields["sequences"])})

    def select(self, rows: Sequence[int], num_trained: int, num_groups: int) -> TrainingRows:
        """Returns these rows, in this order, of which the first `num_trained` are trained on."""
        chosen = lambda table: None if table is None else table[list(rows)]  # noqa: E731
        tables: dict[str, Any] = {name: chosen(getattr(self, name)) for name in _TABLES}
        sequences = self.sequences.select(rows)
        return TrainingRows(sequences=sequences, num_trained=num_trained, num_groups=num_groups, **tables)


def training_rows(
    rounds: Sequence[Round], algorithm: ReasoningAlgorithmConfig, kept: Collection[tuple[int, int]] | None
) -> TrainingRows:
    """Returns all completions of a block's rounds, those that are trained on in the order of rounds and groups.

    `kept` are the (round, group within the block) that count; None: every group, or those with nonzero variance where
    the others are dropped.
    """
    every = _every_row(rounds, algorithm)
    drops = kept is None and algorithm.name is not ReasoningName.ppo and algorithm.drop_zero_variance_groups
    places, start = dict[tuple[int, int], list[int]](), 0  # of rows that may be trained on, by round and group
    for number, one in enumerate(rounds):
        made, spread = one.generation, nonzero_variance_groups(one.reward.raw).tolist()
        places |= {(number, k): [] for k, differs in enumerate(spread) if differs or not drops}
        for row, (sample, ended) in enumerate(zip(made.samples, made.ended.tolist(), strict=True), start):
            key = number, sample // made.group_size
            if key in places and (ended or not algorithm.mask_truncated):
                places[key].append(row)
        start += len(made.samples)
    chosen = [places[key] for key in (places if kept is None else sorted(kept, key=lambda key: key[0]))]
    trained = [row for group in chosen for row in group]
    watched = sorted(set(range(len(every))) - set(trained))
    moved = (every.advantages != 0).any(dim=1).tolist()
    useful = sum(any(moved[row] for row in group) for group in chosen)
    return every.select(trained + watched, len(trained), useful)


def _every_row(rounds: Sequence[Round], algorithm: ReasoningAlgorithmConfig) -> TrainingRows:
    """Returns the completions of all rounds, in order."""
    every = [one.generation for one in rounds]
    sequences = _joined([made.rows for made in every])
    width = sequences.mask.shape[1]
    # zeros are added, or columns cut off that no row needs
    table = lambda parts: pad_sequence([row[:width] for part in parts for row in part], batch_first=True)  # noqa: E731

    def of_stage(name: str) -> Tensor | None:
        found = [part.log_probs for one in rounds if (part := getattr(one, name)) is not None]
        return None if not found or found[0] is None else table(found)

    return TrainingRows(
        sequences=sequences,
        rollout_log_probs=table([made.log_probs for made in every]),
        advantages=table([_advantages(one, algorithm, width) for one in rounds]),
        old_log_probs=of_stage("old_log_probs"),
        reference=of_stage("reference"),
        num_trained=len(sequences),
        num_groups=sum(len(made.problems) for made in every),
    )


def _joined(parts: Sequence[TokenBatch]) -> TokenBatch:
    table = lambda tables: pad_sequence([row for part in tables for row in part], batch_first=True)  # noqa: E731
    given = [torch.zeros_like(part.mask) if part.given is None else part.given for part in parts]
    return TokenBatch(
        table(part.tokens for part in parts),
        torch.cat([part.prompt_lengths for part in parts]),
        torch.cat([part.lengths for part in parts]),
        None if all(part.given is None for part in parts) else table(given),
    )


def _advantages(one: Round, algorithm: ReasoningAlgorithmConfig, width: int) -> Tensor:
    """Returns the advantages of all completions of a round, [K x G, R]."""
    if one.critic is not None:
        return one.critic
    if algorithm.name is ReasoningName.rloo:
        found = leave_one_out_advantages(one.reward.rewards)
    else:
        found = group_advantages(one.reward.rewards, scale_by_std=algorithm.scale_by_std)
    return found.flatten()[list(one.generation.samples)][:, None].expand(-1, width)


# ---------------------------------------------------------------------------------------------------------------- loss
@dataclass(frozen=True, slots=True)
class Objective:
    """The inputs of a loss other than its rows."""

    policy: LanguagePolicy
    algorithm: ReasoningAlgorithmConfig
    temperature: float
    max_new_tokens: int
    largest: dict[int, Tensor]  # by block, filled: largest |pi_old - generation|, |pi - pi_old| of a token, logarithms
    ratio_counts: Tensor | None = None  # float32 [BINS], to which passes add those of their tokens' log ratios

    def passes(self, block: int, rows: TrainingRows, index: Tensor, device: str) -> list[Pass]:
        """Returns the microbatches of some rows of a block, none of them computed yet.

        Rows without a gradient count in the loss's denominator if they are part of the loss.  The metrics read a few of
        them, each in the place of several.
        """
        every, moved = index.tolist(), (rows.advantages != 0).any(dim=1).tolist()
        lengths = rows.sequences.lengths.tolist()
        algorithm = self.algorithm
        regularised = bool(algorithm.entropy_coef or algorithm.kl_coef) or algorithm.loss.regularizes
        trained = [row for row in every if row < rows.num_trained and (regularised or moved[row])]
        others = sorted(set(every) - set(trained))
        watched = others[:: max(1, -(-len(others) // _WATCHED))]
        unread, made = self._weight(rows, sorted(set(others) - set(watched))), []
        for chosen, trains in ((trained, True), (watched, False)):
            share = 1.0 if trains else len(others) / max(1, len(watched))
            for places in dynamic_batches(lengths, algorithm.tokens_per_microbatch, self.policy.packs, chosen):
                weight = self._weight(rows, places) + unread
                made.append(Pass(weight, partial(self._sums, block, rows, places, device, weight, share), trains))
                unread = 0.0  # the first pass counts it
        return made

    def _sums(
        self, block: int, rows: TrainingRows, index: Sequence[int], device: str, weight: float, share: float
    ) -> LossSums:
        """Makes a pass; `share` is the number of rows that each of these stands for in the statistics."""
        batch = rows.sequences.select(index).to(device)
        algorithm, mask = self.algorithm, batch.mask
        width = mask.shape[1]
        cut = lambda table: table[list(index), :width].to(mask.device)  # noqa: E731
        with computing(algorithm.precision, device):
            found = self.policy.log_probs(batch, self.temperature, entropy_gradient=algorithm.entropy_coef != 0)
        assert found.entropy is not None
        log_probs, recorded = found.log_probs, cut(rows.rollout_log_probs)
        # with one step per iteration the weights are those that sampled: the ratio is 1, and this pass says pi_old
        old = log_probs.detach() if rows.old_log_probs is None else cut(rows.old_log_probs)
        # of each token in the loss: 0 in rows that do not count
        weights = (mask & torch.tensor([row < rows.num_trained for row in index], device=mask.device)[:, None]).float()
        if algorithm.loss_level is LossLevel.sequence:
            weights = weights / mask.sum(-1, keepdim=True).clamp(min=1)
        if self.ratio_counts is not None:
            self.ratio_counts.add_(Histogram.count((log_probs - old).detach()[weights > 0], LARGEST_LOG_RATIO))
        importance = None
        if algorithm.tis_cap is not None:
            importance = truncated_importance_weights(old, recorded, mask, algorithm.tis_cap)
        reference = None if rows.reference is None else cut(rows.reference)
        clip, at_level, length = (algorithm.clip_low, algorithm.clip_high), reference, None
        parts = (log_probs, old, cut(rows.advantages), mask, *clip, weights, importance)
        if algorithm.loss.sequence_level:  # a completion has one ratio, and one advantage
            whole = lambda table: torch.where(mask, table, 0.0).sum(-1)  # noqa: E731
            length = mask.sum(-1).clamp(min=1)
            of_rows = None if importance is None else whole(importance) / length
            trained = (whole(log_probs), whole(old), parts[2][:, 0], mask.any(-1))
            parts = (*trained, *clip, whole(weights), of_rows)
            at_level = None if reference is None else whole(reference)
        options = {"loss": algorithm.loss, "dual_clip": algorithm.dual_clip}
        terms = policy_loss(*parts, **options, length=length, reference=at_level)
        loss = terms.loss
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (weights * found.entropy).sum()
        kl = torch.zeros_like(log_probs)
        if reference is not None:
            kl = reference_kl(log_probs, reference, mask)
            loss = loss + algorithm.kl_coef * (weights * kl).sum()
        statistics = [
            *(terms.loss, terms.approx_kl, terms.clipped, terms.count),
            *((found.entropy * mask).sum(), mask.sum()),
            *(*self._measured(block, log_probs.detach(), old, recorded, mask), kl.sum()),
        ]
        counted = torch.stack([s.detach().to(torch.float32).reshape(()) for s in statistics])
        return LossSums(loss, mask.new_tensor(weight, dtype=torch.float32), counted * share)

    def _measured(self, block: int, now: Tensor, old: Tensor, recorded: Tensor, mask: Tensor) -> list[Tensor]:
        """Returns sums: how training's log-probs differ from generation's, and how many weights the cap cuts off."""
        distance, largest, kl, ratios = mismatch(old, recorded, mask)
        moved = torch.where(mask, now - old, 0.0).abs().max()
        differences = torch.stack([largest.float(), moved]).cpu()
        self.largest[block] = torch.maximum(self.largest.get(block, torch.zeros(2)), differences)
        cap = torch.inf if self.algorithm.tis_cap is None else self.algorithm.tis_cap
        return [distance, kl, ratios, (mask & (old - recorded > torch.tensor(cap).log())).sum()]

    def _weight(self, rows: TrainingRows, index: Sequence[int]) -> float:
        """Returns what some rows add to the loss's denominator."""
        counted = [row for row in index if row < rows.num_trained]
        if self.algorithm.loss_level in (LossLevel.sequence, LossLevel.sum):
            return float(len(counted))
        if self.algorithm.loss_level is LossLevel.constant:
            return float(len(counted) * self.max_new_tokens)
        return float(rows.sequences.mask[counted].sum())


def zero_loss(policy: LanguagePolicy, device: str, precision: Precision = Precision.float32) -> Tensor:
    """Returns 0 from a forward pass over two tokens: for a worker that takes part in a pass of others."""
    token = policy.spec.eos_ids[0]
    batch = TokenBatch(torch.tensor([[token, token]]), torch.tensor([1]), torch.tensor([2])).to(device)
    with computing(precision, device):
        return policy.log_probs(batch, 1.0, with_entropy=False).log_probs.sum() * 0.0
