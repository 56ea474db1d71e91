"""What flows through the reasoning workflow: prompts, groups of completions, and microbatches of them.

Dynamic batching: microbatches have a budget of tokens and are sorted by length, so that little of them is padding.
Which rows share one is a function of the lengths and the budget alone, so a block's microbatches (and so the last bits
of its log-probs and gradients) do not depend on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, R = the longest; entries behind a row's length are 0 (tokens: padding).

    Episodes may have several rows each, with prompts of their own.
    """

    prompt: Prompt
    tokens: Tensor  # int64 [G, R]
    lengths: Tensor  # int64 [G], at least 1; the ending token counts
    log_probs: Tensor  # float32 [G, R], of all tokens at the temperature (top_k, ... left aside); greedy: at 1
    ended: Tensor  # bool [G], False where max_new_tokens cut the completion off
    given: Tensor | None = None  # bool [G, R], where a token is a tool's; None: the policy sampled all of them
    prompts: tuple[tuple[int, ...], ...] | None = None  # of each row; None: all have that of `prompt`
    samples: tuple[int, ...] | None = None  # number of the sample that each row is of; None: a row each
    versions: Tensor | None = None  # int64 [G, R], of the weights that sampled each token; None: of one version


# ------------------------------------------------------------------------------------------------- between the stages
@dataclass(frozen=True, slots=True)
class PromptSet:
    """The problems of a block, each with its prompt, and those of the other blocks of its batch."""

    blocks: tuple[tuple[tuple[Problem, Prompt], ...], ...]
    index: int  # of this block among them


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model is to continue in a turn of episodes: `group_size` samples of each prompt."""

    prompts: tuple[Prompt, ...]
    group_size: int
    numbers: tuple[int, ...] = ()  # of the episodes, among those that are run together; in order of the rows


@dataclass(frozen=True, slots=True)
class Completions:
    """What was generated for a block: K groups of G completions, or episodes of several turns."""

    problems: tuple[Problem, ...]  # K
    groups: tuple[Group, ...]  # K
    texts: tuple[str, ...]  # K x G, group by group
    version: int  # of the weights
    turns: int = 0  # of all of them together; 0: one each
    earned: tuple[float | None, ...] | None = None  # K x G: rewards that agents gave; None: the verifier gives them

    def last_rows(self) -> list[int]:
        """Returns the number of each sample's last row among the rows of all groups."""
        last, start, size = {}, 0, len(self.texts) // len(self.groups)
        for k, group in enumerate(self.groups):
            for row, sample in enumerate(group.samples or range(size)):
                last[k, sample] = start + row
            start += len(group.lengths)
        return [last[k, sample] for k in range(len(self.groups)) for sample in range(size)]


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
    finish_s: dict[int, float]
    stale: int | None = None  # tokens of older weights than the last ones; None: all are of one version
    load: EngineLoad | None = None  # None: the stage has no engine

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def generation_report(
    made: Collection[Completions], finish_s: dict[int, float], load: EngineLoad | None = None
) -> GenerationReport:
    """Returns what the driver learns of some blocks; tokens that a tool gave are not counted."""
    groups = [group for completions in made for group in completions.groups]
    sampled = [n for group in groups for n in _counts(group)]
    ended = sum(int(group.ended.sum()) for group in groups)
    turns = sum(completions.turns or len(completions.texts) for completions in made)
    number = sum(len(completions.texts) for completions in made)
    stale = [_stale(group, completions.version) for completions in made for group in completions.groups]
    known = sum(stale) if any(group.versions is not None for group in groups) else None
    return GenerationReport(tuple(sampled), number, len(sampled) - ended, turns, finish_s, known, load)


def _stale(group: Group, version: int) -> int:
    if group.versions is None:
        return 0
    inside = torch.arange(group.versions.shape[1]) < group.lengths[:, None]
    sampled = inside if group.given is None else inside & ~group.given
    return int((sampled & (group.versions < version)).sum())


def _counts(group: Group) -> list[int]:
    return (group.lengths if group.given is None else group.lengths - group.given.sum(1)).tolist()


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
    """B prompts with their completions, ragged: Sequences(((5, 6), (8,)), ((7, 1), (9, 1))).

    `given` says of each token of the completions whether it was given instead of sampled; None: none was.
    """

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]
    given: tuple[tuple[bool, ...], ...] | None = None

    @staticmethod
    def of(groups: Sequence[Group]) -> Sequences:
        """Returns all completions of groups, sample by sample."""
        prompts = [p for group in groups for p in group.prompts or [group.prompt.tokens] * len(group.lengths)]

        def ragged(tables: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
            pairs = [(table.tolist(), group.lengths.tolist()) for table, group in zip(tables, groups, strict=True)]
            return tuple(tuple(row[:n]) for rows, lengths in pairs for row, n in zip(rows, lengths, strict=True))

        some = any(group.given is not None for group in groups)
        masks = [
            torch.zeros_like(g.ended[:, None]).expand(g.tokens.shape) if g.given is None else g.given for g in groups
        ]
        return Sequences(tuple(prompts), ragged([g.tokens for g in groups]), ragged(masks) if some else None)

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> Sequences:
        """Returns these sequences, in this order."""
        chosen = lambda of: tuple(of[row] for row in rows)  # noqa: E731
        given = None if self.given is None else chosen(self.given)
        return Sequences(chosen(self.prompts), chosen(self.completions), given)

    def lengths(self) -> list[int]:
        """Returns tokens of prompt and completion together, by sequence."""
        return [len(prompt) + len(rest) for prompt, rest in zip(self.prompts, self.completions, strict=True)]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Returns the tokens of these completions, without those that were given."""
        given = 0 if self.given is None else sum(sum(self.given[row]) for row in rows)
        return sum(len(self.completions[row]) for row in rows) - given

    def split(self, rows: Sequence[int], token_budget: int, packed: bool = False) -> list[list[int]]:
        """Returns these rows in microbatches, as `dynamic_batches` does."""
        parts = dynamic_batches(self.select(rows).lengths(), token_budget, packed)
        return [[rows[place] for place in part] for part in parts]

    def batch(self, rows: Sequence[int], pad_id: int) -> TokenBatch:
        """Returns these sequences, padded on the right to the longest of them."""
        whole = [[*self.prompts[row], *self.completions[row]] for row in rows]
        longest = max(map(len, whole))
        return TokenBatch(
            tokens=torch.tensor([sequence + [pad_id] * (longest - len(sequence)) for sequence in whole]),
            prompt_lengths=torch.tensor([len(self.prompts[row]) for row in rows]),
            lengths=torch.tensor([len(sequence) for sequence in whole]),
            given=None if self.given is None else self._given(rows),
        )

    def _given(self, rows: Sequence[int]) -> Tensor:
        assert self.given is not None
        longest = max(len(self.given[row]) for row in rows)
        return torch.tensor([[*self.given[row], *[False] * (longest - len(self.given[row]))] for row in rows])


def dynamic_batches(lengths: Sequence[int], token_budget: int, packed: bool = False) -> list[list[int]]:
    """Returns row numbers of each microbatch, longest sequences first; rows x longest stays within the budget.

    Of packed rows, which have no padding, the sum of the lengths does.

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
    found: Callable[[TokenBatch], Tensor],
    sequences: Sequences,
    token_budget: int,
    pad_id: int,
    device: str,
    packed: bool = False,
) -> Tensor:
    """Returns what `found` gives for the tokens of all completions in the order of `sequences`, float32 [B, R]."""
    table = torch.zeros(len(sequences), max(map(len, sequences.completions)), device=device)
    for rows in dynamic_batches(sequences.lengths(), token_budget, packed):
        part = found(sequences.batch(rows, pad_id).to(device))
        table[rows, : part.shape[1]] = part
        report_progress()
    return table


def all_log_probs(policy: LanguagePolicy, sequences: Sequences, temperature: float, token_budget: int) -> Tensor:
    """Returns log-probs of all completions in the order of `sequences`, float32 [B, R], without a gradient."""
    device = str(next(policy.module.parameters()).device)
    found = lambda batch: policy.log_probs(batch, temperature, with_entropy=False).log_probs  # noqa: E731
    return token_table(found, sequences, token_budget, policy.spec.pad_id, device, policy.packs)
