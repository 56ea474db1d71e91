"""The data of the reasoning workflow: prompts, completions, rewards, and microbatches of completions.

Dynamic batching: a microbatch has a budget of tokens, and rows are sorted by length so that little of it is padding.
Which rows share a microbatch is a function of the lengths and the budget alone.  A block's microbatches, and therefore
the last bits of its log-probs and gradients, do not depend on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one completion, for example Prompt(17, (5, 6, 2)).

    The id, which is unique within the run's data, keys the noise of the completion, together with sample and position.
    """

    id: int
    tokens: tuple[int, ...]
    sample: int = 0  # index among the samples of the problem
    place: int = 0  # position of the next token: number of tokens of the episode so far, without the first prompt
    room: int | None = None  # largest number of new tokens; None: max_new_tokens


PromptedProblem = tuple[Problem, Prompt]
Batch = tuple[tuple[PromptedProblem, ...], ...]  # the problems of neighbouring blocks that decode together


@dataclass(frozen=True, slots=True)
class GenerationBlock:
    """A request to continue prompts; an end token, a stop string or the length limit ends a continuation.

    The uniforms are keyed by (seed, purpose, iteration, prompt id, sample, position).
    """

    prompts: tuple[Prompt, ...]
    sampling: GenerationConfig  # its max_num_seqs is S, the number of rows that decode together
    seed: int
    iteration: int
    purpose: str = "token"  # evaluation has another one
    greedy: bool = False  # always take the likeliest token
    records_support: bool = True  # of restricted sampling; evaluation does not need it


# ------------------------------------------------------------------------------------------------- between the stages
@dataclass(frozen=True, slots=True)
class Completions:
    """The completions of a block: G samples of each of K problems, in B rows.

    A sample is one row, or an episode of several rows with separate prompts.
    """

    problems: tuple[Problem, ...]  # K
    texts: tuple[str, ...]  # K x G, problem by problem: text of each sample's last turn
    version: int  # of the weights
    rows: TokenBatch  # B, sample by sample; at least one token each, the end token included
    log_probs: Tensor  # float32 [B, R], of the distribution sampled from; greedy: at temperature 1
    ended: Tensor  # bool [B], False if max_new_tokens cut a row off
    samples: tuple[int, ...]  # B, ascending: index of each row's sample in `texts`
    turns: int  # of all samples together
    agent_rewards: tuple[float | None, ...]  # K x G; None: the sample is scored by the reward stage
    versions: Tensor | None = None  # int64 [B, R], of the weights that sampled each token; None: all are `version`

    @property
    def group_size(self) -> int:
        return len(self.texts) // len(self.problems)

    def last_rows(self) -> list[int]:
        """Returns the index of each sample's last row."""
        return list({sample: row for row, sample in enumerate(self.samples)}.values())


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of a block's completions, [K, G] each."""

    rewards: Tensor  # float32
    raw: Tensor  # float32, without format reward and penalties: 1 or 0 for right or wrong, or a custom reward


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of a block's completions under given weights."""

    log_probs: Tensor | None  # float32 [B, R]; None: the learner computes them
    version: int


# ------------------------------------------------------------------------------------------------------------- reports
@dataclass(slots=True)
class EngineLoad:
    """Load of an engine while it decoded; sums of several workers can be added."""

    seconds: float = 0.0
    waiting_s: float = 0.0  # time that rows waited for a slot, summed over rows
    tail_s: float = 0.0  # time in which fewer than a quarter of `most` rows decoded
    rows: int = 0  # finished rows
    most: int = 0  # largest number of rows that decoded at once

    def add(self, seconds: float, decoding: int, waiting: int, ended: int) -> None:
        """Adds an interval."""
        self.most = max(self.most, decoding)
        self.seconds += seconds
        self.waiting_s += seconds * waiting
        self.tail_s += seconds * (4 * decoding < self.most)
        self.rows += ended

    def take(self) -> EngineLoad:
        """Returns the load since the last call."""
        load = replace(self)
        self.seconds, self.waiting_s, self.tail_s, self.rows = 0.0, 0.0, 0.0, 0
        return load


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """Counts of generation for the driver."""

    lengths: tuple[int, ...]  # sampled tokens of each row
    completions: int
    truncated: int  # completions that were cut off
    turns: int
    stale: int  # tokens that older weights sampled
    finish_s: dict[int, float]  # seconds from the call to the end of each block (StageSpec.at_once)
    loads: Sequence[EngineLoad]  # of each call of the engine

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def generation_report(
    blocks: Collection[Completions], finish_s: dict[int, float], loads: Sequence[EngineLoad] = ()
) -> GenerationReport:
    """Returns the report of some blocks; tokens that a tool inserted are not counted."""
    stale = [block.rows.mask & (block.versions < block.version) for block in blocks if block.versions is not None]
    return GenerationReport(
        lengths=tuple(length for block in blocks for length in block.rows.mask.sum(1).tolist()),
        completions=sum(len(block.texts) for block in blocks),
        truncated=sum(int((~block.ended[block.last_rows()]).sum()) for block in blocks),
        turns=sum(block.turns for block in blocks),
        stale=sum(int(tokens.sum()) for tokens in stale),
        finish_s=finish_s,
        loads=loads,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion for people to read, for example Sample("3+4=", "7", "3+4=8", False)."""

    prompt: str
    answer: str
    completion: str
    correct: bool


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Rewards of a group, for the driver."""

    block: int
    index: int  # within the block
    correct: tuple[bool, ...]
    zero_variance: bool  # whether all completions have the same raw reward
    reward: float  # sum
    formatted: int  # number of completions in the right format
    named: Mapping[str, float] = field(default_factory=dict)  # sums of named rewards
    key: str = ""  # Problem.key
    majority: bool | None = None  # whether the most frequent answer is right; None: not computed
    sample: Sample | None = None


def in_order(reports: Iterable[Sequence[ScoredGroup]]) -> list[ScoredGroup]:
    """Returns the groups of all workers in the order of blocks."""
    return sorted((group for report in reports for group in report), key=lambda group: (group.block, group.index))


# --------------------------------------------------------------------------------------------------------- microbatches
def dynamic_batches(
    lengths: Sequence[int], token_budget: int, packed: bool = False, rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Returns the row indices of each microbatch, longest sequences first.

    The number of rows times the longest length stays within the budget; for packed rows, which have no padding, the
    sum of the lengths.  `rows` are the rows to distribute; None: all.

    Raises:
        ConfigError: a single sequence exceeds the budget.
    """
    order = sorted(range(len(lengths)) if rows is None else rows, key=lambda row: -lengths[row])
    if order and lengths[order[0]] > token_budget:
        raise ConfigError(
            f"algorithm.tokens_per_microbatch is {token_budget}, but sequence {order[0]} has {lengths[order[0]]} "
            f"tokens and none is cut: use at least {lengths[order[0]]}"
        )
    batches: list[list[int]] = []
    if packed:
        room: list[int] = []  # tokens left in each batch
        for row in order:
            index = next((k for k, left in enumerate(room) if lengths[row] <= left), len(room))
            if index == len(room):
                batches.append([])
                room.append(token_budget)
            batches[index].append(row)
            room[index] -= lengths[row]
        return batches
    for row in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@torch.no_grad()
def token_table(
    compute: Callable[[TokenBatch], Tensor], sequences: TokenBatch, token_budget: int, device: str, packed: bool = False
) -> Tensor:
    """Computes a value for every token of all completions, in microbatches; returns float32 [B, R]."""
    table = torch.zeros(sequences.mask.shape, device=device)
    for rows in dynamic_batches(sequences.lengths.tolist(), token_budget, packed):
        values = compute(sequences.select(rows).to(device))
        table[rows, : values.shape[1]] = values
        report_progress()
    return table


def all_log_probs(policy: LanguagePolicy, sequences: TokenBatch, temperature: float, token_budget: int) -> Tensor:
    """Returns the log-probs of all completions, float32 [B, R], without a gradient."""
    device = str(next(policy.module.parameters()).device)
    log_probs = lambda batch: policy.log_probs(batch, temperature, with_entropy=False).log_probs  # noqa: E731
    return token_table(log_probs, sequences, token_budget, device, policy.packs)
