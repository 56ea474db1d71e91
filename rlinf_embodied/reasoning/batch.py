"""What flows through the reasoning workflow: prompts, completions, and microbatches of them.

Dynamic batching: microbatches have a budget of tokens and are sorted by length, so that little of them is padding.
Which rows share one is a function of the lengths and the budget alone, so a block's microbatches (and so the last bits
of its log-probs and gradients) do not depend on the worker.
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
    """One prompt, as Prompt(17, (5, 6, 2)): the id keys its noise and is unique within the run's data.

    A later turn of an episode is sample `sample` of its problem's, and continues at `place` of its continuation.
    """

    id: int
    tokens: tuple[int, ...]
    sample: int = 0  # number of the first of its samples
    place: int = 0  # tokens of its continuation so far
    room: int | None = None  # tokens that it may have; None: max_new_tokens


Asked = tuple[Problem, Prompt]
Batch = tuple[tuple[Asked, ...], ...]  # of each of the neighbouring blocks that decode together


@dataclass(frozen=True, slots=True)
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


# ------------------------------------------------------------------------------------------------- between the stages
@dataclass(frozen=True, slots=True)
class Turn:
    """What the model is to continue in a turn of episodes: `group_size` samples of each prompt."""

    prompts: tuple[Prompt, ...]
    group_size: int
    numbers: tuple[int, ...]  # of the episodes, among those that are run together; in order of the rows


@dataclass(frozen=True, slots=True)
class Completions:
    """What was generated for a block: G samples of each of K problems, in B rows.

    A sample is a row, or, as an episode, several rows with prompts of their own.
    """

    problems: tuple[Problem, ...]  # K
    texts: tuple[str, ...]  # K x G, problem by problem: of a sample's last turn
    version: int  # of the weights
    rows: TokenBatch  # B, sample by sample; at least one token each, the ending one counts
    log_probs: Tensor  # float32 [B, R], of all tokens at the temperature (top_k, ... left aside); greedy: at 1
    ended: Tensor  # bool [B], False where max_new_tokens cut a row off
    samples: tuple[int, ...]  # B, ascending: number of each row's sample among the texts
    turns: int  # of all samples together
    earned: tuple[float | None, ...]  # K x G: rewards that agents gave; None: the verifier gives them
    versions: Tensor | None = None  # int64 [B, R], of the weights that sampled each token; None: all are `version`

    @property
    def group_size(self) -> int:
        return len(self.texts) // len(self.problems)

    def last_rows(self) -> list[int]:
        """Returns the number of each sample's last row."""
        return list({sample: row for row, sample in enumerate(self.samples)}.values())


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
@dataclass(slots=True)
class EngineLoad:
    """How busy an engine was while it decoded; the sums of several workers can be added."""

    seconds: float = 0.0
    waiting_s: float = 0.0  # that rows waited for a slot, of all rows together
    tail_s: float = 0.0  # in which fewer than a quarter of `most` rows decoded
    rows: int = 0  # that ended
    most: int = 0  # rows that have decoded at once, so far

    def add(self, seconds: float, decoding: int, waiting: int, ended: int) -> None:
        """Adds an interval."""
        self.most = max(self.most, decoding)
        self.seconds += seconds
        self.waiting_s += seconds * waiting
        self.tail_s += seconds * (4 * decoding < self.most)
        self.rows += ended

    def take(self) -> EngineLoad:
        """Returns what was added since the last call."""
        found = replace(self)
        self.seconds, self.waiting_s, self.tail_s, self.rows = 0.0, 0.0, 0.0, 0
        return found


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What the driver learns of generation; `finish_s` as StageSpec.at_once asks for it."""

    lengths: tuple[int, ...]  # sampled tokens of each row
    completions: int
    truncated: int
    turns: int
    stale: int  # tokens of older weights than the last ones
    finish_s: dict[int, float]
    load: EngineLoad | None = None  # None: the stage has no engine

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def generation_report(
    made: Collection[Completions], finish_s: dict[int, float], load: EngineLoad | None = None
) -> GenerationReport:
    """Returns what the driver learns of some blocks; tokens that a tool gave are not counted."""
    older = [one.rows.mask & (one.versions < one.version) for one in made if one.versions is not None]
    return GenerationReport(
        lengths=tuple(n for one in made for n in one.rows.mask.sum(1).tolist()),
        completions=sum(len(one.texts) for one in made),
        truncated=sum(int((~one.ended[one.last_rows()]).sum()) for one in made),
        turns=sum(one.turns for one in made),
        stale=sum(int(tokens.sum()) for tokens in older),
        finish_s=finish_s,
        load=load,
    )


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
def dynamic_batches(
    lengths: Sequence[int], token_budget: int, packed: bool = False, rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Returns row numbers of each microbatch, longest sequences first; rows x longest stays within the budget.

    Of packed rows, which have no padding, the sum of the lengths does.  Only these `rows` are there; None: all.

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
        room: list[int] = []  # of each batch
        for row in order:
            place = next((k for k, left in enumerate(room) if lengths[row] <= left), len(room))
            if place == len(room):
                batches, room = [*batches, []], [*room, token_budget]
            batches[place].append(row)
            room[place] -= lengths[row]
        return batches
    for row in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@torch.no_grad()
def token_table(
    found: Callable[[TokenBatch], Tensor], sequences: TokenBatch, token_budget: int, device: str, packed: bool = False
) -> Tensor:
    """Returns what `found` gives for the tokens of all completions in the order of `sequences`, float32 [B, R]."""
    table = torch.zeros(sequences.mask.shape, device=device)
    for rows in dynamic_batches(sequences.lengths.tolist(), token_budget, packed):
        part = found(sequences.select(rows).to(device))
        table[rows, : part.shape[1]] = part
        report_progress()
    return table


def all_log_probs(policy: LanguagePolicy, sequences: TokenBatch, temperature: float, token_budget: int) -> Tensor:
    """Returns log-probs of all completions in the order of `sequences`, float32 [B, R], without a gradient."""
    device = str(next(policy.module.parameters()).device)
    found = lambda batch: policy.log_probs(batch, temperature, with_entropy=False).log_probs  # noqa: E731
    return token_table(found, sequences, token_budget, device, policy.packs)
