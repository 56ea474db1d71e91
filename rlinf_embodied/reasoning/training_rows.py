"""What an actor trains on: the completions of a block that count, with their advantages and log-probs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import group_advantages, groups_with_spread, leave_one_out_advantages
from rlinf_embodied.config import ReasoningAlgorithmConfig, ReasoningName
from rlinf_embodied.reasoning.batch import Completions, LogProbs, Rewards, TokenAdvantages
from rlinf_embodied.reasoning.packing import Sequences


@dataclass(frozen=True, slots=True)
class Round:
    """What the stages before the actor made of a block in one round; None where there is no such stage."""

    completions: Completions
    rewards: Rewards
    proximal: LogProbs | None = None
    reference: LogProbs | None = None
    advantages: TokenAdvantages | None = None


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """B completions; tables are float32 [B, R], anything behind a row's length."""

    sequences: Sequences
    behaviour: Tensor  # log-probs of the distribution that was sampled from
    log_mass: Tensor  # of the nucleus that it was restricted to; behaviour + log_mass is what training computes
    advantages: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    num_groups: int

    def __len__(self) -> int:
        return len(self.sequences)


def training_rows(
    rounds: Sequence[Round], algorithm: ReasoningAlgorithmConfig, kept: Collection[tuple[int, int]] | None
) -> TrainingRows | None:
    """Returns the rows of a block, None if there are none.

    Args:
        rounds: all rounds of the block.
        algorithm: whose advantages they get.
        kept: (round, group within the block) of what counts; None: every group, or those that differ where uniform
            ones are dropped.
    """
    if kept is None:
        kept = [(number, group) for number, r in enumerate(rounds) for group in _useful(r, algorithm)]
    parts = [_rows(round_, [g for n, g in kept if n == number], algorithm) for number, round_ in enumerate(rounds)]
    found = [part for part in parts if part is not None]
    return _joined(found) if found else None


def _useful(round_: Round, algorithm: ReasoningAlgorithmConfig) -> list[int]:
    every = range(len(round_.completions.groups))
    if algorithm.name is ReasoningName.ppo or not algorithm.drop_uniform_groups:
        return list(every)
    spread = groups_with_spread(round_.rewards.raw)
    return [group for group in every if spread[group]]


def _rows(round_: Round, groups: Sequence[int], algorithm: ReasoningAlgorithmConfig) -> TrainingRows | None:
    chosen = [round_.completions.groups[group] for group in groups]
    size = len(round_.completions.groups[0].lengths)
    ended = [bool(e) for group in chosen for e in group.ended]
    places = [group * size + member for group in groups for member in range(size)]
    rows = [i for i in range(len(places)) if ended[i] or not algorithm.mask_truncated]
    if not rows:
        return None
    sequences = Sequences.of(chosen)
    longest = max(map(len, sequences.completions))
    table = lambda parts: torch.cat([_widened(part, longest) for part in parts])[rows]  # noqa: E731
    of_block = lambda whole: _widened(whole.log_probs, longest)[places][rows] if whole else None  # noqa: E731
    return TrainingRows(
        sequences=sequences.select(rows),
        behaviour=table([group.log_probs for group in chosen]),
        log_mass=table([group.log_mass for group in chosen]),
        advantages=_advantages(round_, algorithm, longest)[places][rows],
        proximal=of_block(round_.proximal),
        reference=of_block(round_.reference),
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
    width = max(part.behaviour.shape[1] for part in parts)
    table = lambda name: torch.cat([_widened(getattr(part, name), width) for part in parts])  # noqa: E731
    optional = lambda name: None if getattr(parts[0], name) is None else table(name)  # noqa: E731
    return TrainingRows(
        sequences=Sequences.concatenate([part.sequences for part in parts]),
        behaviour=table("behaviour"),
        log_mass=table("log_mass"),
        advantages=table("advantages"),
        proximal=optional("proximal"),
        reference=optional("reference"),
        num_groups=sum(part.num_groups for part in parts),
    )
