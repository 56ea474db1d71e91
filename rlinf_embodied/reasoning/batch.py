"""What flows through the reasoning workflow: prompts, groups of completions, and microbatches of them.

Dynamic batching: microbatches have a budget of tokens and are sorted by length, so that little of them is padding.
Which rows share one is a function of the lengths and the budget alone, so a block's microbatches (and so the last bits
of its log-probs and gradients) do not depend on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as Prompt(17, (5, 6, 2)): the id keys its noise and is unique within the run's data."""

    id: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBlock:
    """A fixed list of prompts, G samples each; an ending token, a stop string or its length ends each.

    Its uniforms are keyed by seed, purpose and iteration, besides prompt, sample and position.
    """

    prompts: tuple[Prompt, ...]
    group_size: int  # G
    sampling: GenerationConfig  # its max_num_seqs is S, the rows that decode together: memory against speed
    seed: int
    iteration: int
    purpose: str = "token"  # evaluation draws under another name
    greedy: bool = False  # the likeliest token, always


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, R = the longest; entries behind a row's length are 0 (tokens: padding)."""

    prompt: Prompt
    tokens: Tensor  # int64 [G, R]
    lengths: Tensor  # int64 [G], at least 1; the ending token counts
    log_probs: Tensor  # float32 [G, R], of all tokens at the temperature (top_k, ... left aside); greedy: at 1
    ended: Tensor  # bool [G], False where max_new_tokens cut the completion off


# ------------------------------------------------------------------------------------------------- between the stages
@dataclass(frozen=True, slots=True)
class PromptSet:
    """The problems of a block, each with its prompt, and those of the other blocks of its batch."""

    blocks: tuple[tuple[tuple[Problem, Prompt], ...], ...]
    index: int  # of this block among them


@dataclass(frozen=True, slots=True)
class Completions:
    """What was generated for a block: K groups of G completions."""

    problems: tuple[Problem, ...]  # K
    groups: tuple[Group, ...]  # K
    texts: tuple[str, ...]  # K x G, group by group
    version: int  # of the weights


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a block's completions earned; [K, G] each."""

    rewards: Tensor  # float32
    raw: Tensor  # float32, the raw metric: right (1) or wrong (0), or the value of the user's function


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of a block's completions under some weights."""

    log_probs: Tensor | None  # float32 [K x G, R]; None: the learner computes them
    version: int


# ------------------------------------------------------------------------------------------------------------- reports
@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What the driver learns of generation; `finish_s` as StageSpec.at_once asks for it."""

    tokens: int
    completions: int
    truncated: int
    longest: int
    finish_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion for people to read, as Sample("3+4=", "7", "3+4=8", False)."""

    prompt: str
    answer: str
    completion: str
    correct: bool


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """What the driver learns of a group's rewards."""

    block: int
    index: int  # within the block
    correct: tuple[bool, ...]
    zero_variance: bool  # whether the group's completions are all alike in the raw metric
    reward: float  # sum
    formatted: int  # number
    named: Mapping[str, float] = field(default_factory=dict)  # sums of named rewards
    key: str = ""  # of its problem, Problem.key
    majority: bool | None = None  # whether the answer that most completions give is right; None: not counted
    shown: Sample | None = None


def in_order(reports: Iterable[Sequence[ScoredGroup]]) -> list[ScoredGroup]:
    """Returns the groups of all workers in the order of blocks."""
    return sorted((group for report in reports for group in report), key=lambda group: (group.block, group.index))


# --------------------------------------------------------------------------------------------------------- microbatches
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

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> Sequences:
        """Returns these sequences, in this order."""
        return Sequences(tuple(self.prompts[row] for row in rows), tuple(self.completions[row] for row in rows))

    def lengths(self) -> list[int]:
        """Returns tokens of prompt and completion together, by sequence."""
        return [len(prompt) + len(rest) for prompt, rest in zip(self.prompts, self.completions, strict=True)]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Returns the tokens of these completions."""
        return sum(len(self.completions[row]) for row in rows)

    def split(self, rows: Sequence[int], token_budget: int) -> list[list[int]]:
        """Returns these rows in microbatches, as `dynamic_batches` does."""
        return [[rows[place] for place in part] for part in dynamic_batches(self.select(rows).lengths(), token_budget)]

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


@torch.no_grad()
def token_table(
    found: Callable[[TokenBatch], Tensor], sequences: Sequences, token_budget: int, pad_id: int, device: str
) -> Tensor:
    """Returns what `found` gives for the tokens of all completions in the order of `sequences`, float32 [B, R]."""
    table = torch.zeros(len(sequences), max(map(len, sequences.completions)), device=device)
    for rows in dynamic_batches(sequences.lengths(), token_budget):
        part = found(sequences.batch(rows, pad_id).to(device))
        table[rows, : part.shape[1]] = part
        report_progress()
    return table


def all_log_probs(policy: LanguagePolicy, sequences: Sequences, temperature: float, token_budget: int) -> Tensor:
    """Returns log-probs of all completions in the order of `sequences`, float32 [B, R], without a gradient."""
    device = str(next(policy.module.parameters()).device)
    found = lambda batch: policy.log_probs(batch, temperature, with_entropy=False).log_probs  # noqa: E731
    return token_table(found, sequences, token_budget, policy.spec.pad_id, device)
