"""Dynamic batching: microbatches by a budget of tokens, sorted by length, so that little of them is padding.

Which rows share a microbatch is a function of the lengths and the budget alone, so a block's microbatches (and so the
last bits of its log-probs and gradients) do not depend on the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch, TokenLogProbs
from rlinf_embodied.reasoning.batch import Group
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(frozen=True, slots=True)
class Sequences:
    """B prompts with their completions, ragged: Sequences(((5, 6), (8,)), ((7, 1), (9, 1)))."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(groups: Sequence[Group]) -> Sequences:
        """Returns all completions of groups, sample by sample."""
        prompts = [group.prompt.tokens for group in groups for _ in range(len(group.lengths))]
        rows = [
            tuple(row[:length])
            for group in groups
            for row, length in zip(group.tokens.tolist(), group.lengths.tolist(), strict=True)
        ]
        return Sequences(tuple(prompts), tuple(rows))

    @staticmethod
    def concatenate(parts: Sequence[Sequences]) -> Sequences:
        """Returns the sequences of all parts, in order."""
        return Sequences(
            tuple(prompt for part in parts for prompt in part.prompts),
            tuple(rest for part in parts for rest in part.completions),
        )

    def select(self, rows: Sequence[int]) -> Sequences:
        """Returns these sequences, in this order."""
        return Sequences(tuple(self.prompts[row] for row in rows), tuple(self.completions[row] for row in rows))

    def __len__(self) -> int:
        return len(self.prompts)

    def lengths(self) -> list[int]:
        """Returns tokens of prompt and completion together, by sequence."""
        return [len(prompt) + len(rest) for prompt, rest in zip(self.prompts, self.completions, strict=True)]

    def batch(self, rows: Sequence[int], pad_id: int) -> TokenBatch:
        """Returns these sequences, padded on the right to the longest of them."""
        whole = [[*self.prompts[row], *self.completions[row]] for row in rows]
        longest = max(map(len, whole))
        return TokenBatch(
            tokens=torch.tensor([sequence + [pad_id] * (longest - len(sequence)) for sequence in whole]),
            prompt_lengths=torch.tensor([len(self.prompts[row]) for row in rows]),
            lengths=torch.tensor([len(sequence) for sequence in whole]),
        )


def dynamic_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Returns row numbers of each microbatch, longest sequences first; rows x longest stays within the budget.

    Raises:
        ConfigError: a single sequence exceeds the budget.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if order and lengths[order[0]] > token_budget:
        raise ConfigError(
            f"algorithm.tokens_per_microbatch is {token_budget}, but sequence {order[0]} has {lengths[order[0]]} "
            f"tokens and none is cut: use at least {lengths[order[0]]}"
        )
    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def microbatches(
    sequences: Sequences, token_budget: int, pad_id: int, device: str = "cpu"
) -> Iterator[tuple[list[int], TokenBatch]]:
    """Yields (row numbers, batch) of each microbatch."""
    for rows in dynamic_batches(sequences.lengths(), token_budget):
        yield rows, sequences.batch(rows, pad_id).to(device)


@torch.no_grad()
def all_log_probs(
    policy: LanguagePolicy,
    sequences: Sequences,
    temperature: float,
    token_budget: int,
    with_entropy: bool = False,
) -> TokenLogProbs:
    """Returns log-probs of all completions in the order of `sequences`, float32 [B, R], without a gradient."""
    longest = max(map(len, sequences.completions))
    device = next(policy.module.parameters()).device
    log_probs = torch.zeros(len(sequences), longest, device=device)
    entropy = torch.zeros_like(log_probs)
    for rows, batch in microbatches(sequences, token_budget, policy.spec.pad_id, str(device)):
        found = policy.log_probs(batch, temperature, with_entropy)
        _put(log_probs, rows, found.log_probs)
        if found.entropy is not None:
            _put(entropy, rows, found.entropy)
        report_progress()
    return TokenLogProbs(log_probs, entropy if with_entropy else None)


def _put(table: Tensor, rows: list[int], values: Tensor) -> None:
    table[rows, : values.shape[1]] = values
