"""What an actor trains on: the completions of a block, which of them count, and their advantages and log-probs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import group_advantages, leave_one_out_advantages, nonzero_variance_groups
from rlinf_embodied.config import ReasoningAlgorithmConfig, ReasoningName
from rlinf_embodied.reasoning.batch import Completions, LogProbs, Rewards, TokenAdvantages
from rlinf_embodied.reasoning.dynamic_batching import Sequences


@dataclass(frozen=True, slots=True)
class Round:
    """What the stages before the actor made of a block in one round; None where there is no such stage."""

    completions: Completions
    rewards: Rewards
    old_log_probs: LogProbs | None = None
    reference: LogProbs | None = None
    advantages: TokenAdvantages | None = None


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """B completions, those that are trained on first; tables are float32 [B, R], anything behind a row's length."""

    sequences: Sequences
    rollout_log_probs: Tensor  # log-probs of the distribution that was sampled from
    log_mass: Tensor  # of the nucleus that it was restricted to; rollout_log_probs + log_mass is what training computes
    advantages: Tensor
    old_log_probs: Tensor | None
    reference: Tensor | None
    num_trained: int  # the rows behind are looked at only: metrics are of all that was sampled
    num_groups: int  # with a completion that is trained on and has an advantage

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_watched(self) -> int:
        """Rows that are looked at only."""
        return len(self) - self.num_trained

    def select(self, rows: Sequence[int], num_trained: int, num_groups: int) -> TrainingRows:
        """Returns these rows, in this order, of which the first `num_trained` are trained on."""
        take = lambda table: None if table is None else table[list(rows)]  # noqa: E731
        return TrainingRows(
            sequences=self.sequences.select(rows),
            rollout_log_probs=self.rollout_log_probs[list(rows)],
            log_mass=self.log_mass[list(rows)],
            advantages=self.advantages[list(rows)],
            old_log_probs=take(self.old_log_probs),
            reference=take(self.reference),
            num_trained=num_trained,
            num_groups=num_groups,
        )


def training_rows(
    rounds: Sequence[Round], algorithm: ReasoningAlgorithmConfig, kept: Collection[tuple[int, int]] | None
) -> TrainingRows:
    """Returns all completions of a block, those that are trained on in the order of rounds and groups.

    Args:
        rounds: all rounds of the block.
        algorithm: whose advantages they get.
        kept: (round, group within the block) of what counts; None: every group, or those with nonzero variance where
            the others are dropped.
    """
    every = _joined([_rows(round_, algorithm) for round_ in rounds])
    if kept is None:
        kept = [(number, group) for number, r in enumerate(rounds) for group in _nonzero_variance(r, algorithm)]
    places = _places(rounds)
    ended = [bool(e) for r in rounds for group in r.completions.groups for e in group.ended]
    counts = lambda row: ended[row] or not algorithm.mask_truncated  # noqa: E731
    chosen = [[row for row in places[key] if counts(row)] for key in sorted(kept, key=lambda key: key[0])]
    trained = [row for group in chosen for row in group]
    watched = sorted(set(range(len(every))) - set(trained))
    moved = (every.advantages != 0).any(dim=1).tolist()
    useful = sum(any(moved[row] for row in group) for group in chosen)
    return every.select(trained + watched, len(trained), useful)


def _places(rounds: Sequence[Round]) -> dict[tuple[int, int], range]:
    """Returns which rows each (round, group) has once all rounds are joined."""
    found, start = {}, 0
    for number, round_ in enumerate(rounds):
        for k, group in enumerate(round_.completions.groups):
            found[number, k] = range(start, start + len(group.lengths))
            start += len(group.lengths)
    return found


def _nonzero_variance(round_: Round, algorithm: ReasoningAlgorithmConfig) -> list[int]:
    every = range(len(round_.completions.groups))
    if algorithm.name is ReasoningName.ppo or not algorithm.drop_zero_variance_groups:
        return list(every)
    spread = nonzero_variance_groups(round_.rewards.raw)
    return [group for group in every if spread[group]]


def _rows(round_: Round, algorithm: ReasoningAlgorithmConfig) -> TrainingRows:
    """Returns all completions of a round."""
    groups = round_.completions.groups
    sequences = Sequences.of(groups)
    longest = max(map(len, sequences.completions))
    table = lambda parts: torch.cat([_widened(part, longest) for part in parts])  # noqa: E731
    of_block = lambda part: None if part is None or part.log_probs is None else _widened(part.log_probs, longest)  # noqa: E731
    return TrainingRows(
        sequences=sequences,
        rollout_log_probs=table([group.log_probs for group in groups]),
        log_mass=table([group.log_mass for group in groups]),
        advantages=_advantages(round_, algorithm, longest),
        old_log_probs=of_block(round_.old_log_probs),
        reference=of_block(round_.reference),
        num_trained=len(sequences),
        num_groups=len(groups),
    )


def _advantages(round_: Round, algorithm: ReasoningAlgorithmConfig, longest: int) -> Tensor:
    """Advantages of all completions of a round, [K x G, R]."""
    if round_.advantages is not None:
        return _widened(round_.advantages.advantages, longest)
    rewards = round_.rewards.rewards
    if algorithm.name is ReasoningName.rloo:
        found = leave_one_out_advantages(rewards)
    else:
        found = group_advantages(rewards, scale_by_std=algorithm.scale_by_std)
    return found.reshape(-1, 1).expand(-1, longest)


def _widened(table: Tensor, width: int) -> Tensor:
    """Returns a table [B, R] with `width` columns: zeros added, or those cut off that no row needs."""
    if table.shape[1] >= width:
        return table[:, :width]
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))


def _joined(parts: Sequence[TrainingRows]) -> TrainingRows:
    width = max(part.rollout_log_probs.shape[1] for part in parts)
    table = lambda name: torch.cat([_widened(getattr(part, name), width) for part in parts])  # noqa: E731
    optional = lambda name: None if getattr(parts[0], name) is None else table(name)  # noqa: E731
    return TrainingRows(
        sequences=Sequences.concatenate([part.sequences for part in parts]),
        rollout_log_probs=table("rollout_log_probs"),
        log_mass=table("log_mass"),
        advantages=table("advantages"),
        old_log_probs=optional("old_log_probs"),
        reference=optional("reference"),
        num_trained=sum(part.num_trained for part in parts),
        num_groups=sum(part.num_groups for part in parts),
    )
