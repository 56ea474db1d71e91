"""Episodes of several turns: the model writes, a tool answers, and the model goes on with what it reads.

    prompt     What is 12*4+50?
    turn 1     12*4= <eos>                  sampled
    tool       48;                          given
    turn 2     48+50= <eos>                 sampled
    tool       98;                          given
    turn 3     #98 <eos>                    sampled: the tool has nothing to say, so the episode ends

Prompt and continuation are token ids throughout: each turn's prompt is exactly what was said before, no sampled token
is ever decoded and encoded again, and given ones are left out of the loss.  An episode of one turn is a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from rlinf_embodied.config import MathConfig, ToolConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy, PromptCodec
from rlinf_embodied.plug_ins import load_plug_in, load_target, named_when_raised
from rlinf_embodied.reasoning.batch import Asked, Completions, GenerationBlock, Group, Prompt, Turn, generation_report
from rlinf_embodied.reasoning.generation import Decoding
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Prompts
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext
from rlinf_embodied.telemetry.progress import report_progress

Tool = Callable[[str, Problem], str | None]  # (what the model wrote in a turn, problem) -> what it reads; None: the end


def tool_of(config: ToolConfig) -> Tool | None:
    """Returns the function that tool._target_ names, None otherwise.

    Raises:
        ConfigError: it cannot be imported, or does not take (text, problem).
    """
    if config._target_ is None:
        return None
    return cast(Tool, load_plug_in(config._target_, "tool._target_", "text", "problem"))


@dataclass(slots=True)
class _Row:
    """One episode."""

    prompt: Prompt
    problem: Problem
    sample: int  # its number within the group
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0 for given tokens
    given: list[bool] = field(default_factory=list)
    last: tuple[int, ...] = ()  # the last turn's tokens
    turns: int = 0
    ended: bool = False  # by its own decision or at the last turn; else max_new_tokens cut it off
    over: bool = False


class Episodes:
    """The episodes of K problems, G of each, turn by turn: all of them end a turn before the tool answers any."""

    def __init__(self, asked: Sequence[Asked], group_size: int, config: MathConfig, codec: PromptCodec) -> None:
        """Begins; `config` says which tool there is, how many turns, and how many tokens an episode has."""
        self._asked, self._group_size, self._codec = asked, group_size, codec
        self._tool, self._most_turns = tool_of(config.tool), config.tool.num_turns
        self._room = config.generation.max_new_tokens
        self._rows = [_Row(prompt, problem, g) for problem, prompt in asked for g in range(group_size)]

    def turn(self) -> Turn | None:
        """Returns what the model is to continue; None where all episodes are over."""
        if self._rows[0].turns == 0:
            return Turn(tuple(prompt for _, prompt in self._asked), self._group_size)
        live = [row for row in self._rows if not row.over]
        return Turn(tuple(self._continued(row) for row in live), 1) if live else None

    def take(self, groups: Sequence[Group]) -> None:
        """Takes the turns of all episodes that are not over, in order, and lets the tool answer them."""
        live = iter([row for row in self._rows if not row.over])
        for group in groups:
            tables = (group.tokens.tolist(), group.log_probs.tolist(), group.lengths.tolist(), group.ended.tolist())
            for tokens, log_probs, length, ended in zip(*tables, strict=True):
                self._add(next(live), tokens[:length], log_probs[:length], ended)
                report_progress()

    def completions(self, version: int) -> Completions:
        """Returns the episodes, K groups of G; a text is that of the last turn."""
        size = self._group_size
        groups = [_group(self._rows[first : first + size]) for first in range(0, len(self._rows), size)]
        texts = tuple(self._codec.decode(row.last) for row in self._rows)
        turns = sum(row.turns for row in self._rows)
        return Completions(tuple(problem for problem, _ in self._asked), tuple(groups), texts, version, turns)

    def _continued(self, row: _Row) -> Prompt:
        tokens = (*row.prompt.tokens, *row.tokens)
        return replace(row.prompt, tokens=tokens, sample=row.sample, place=len(row.tokens))

    def _add(self, row: _Row, tokens: list[int], log_probs: list[float], ended: bool) -> None:
        row.tokens += tokens
        row.log_probs += log_probs
        row.given += [False] * len(tokens)
        row.last, row.turns = tuple(tokens), row.turns + 1
        answer = None
        if ended and row.turns < self._most_turns and self._tool is not None:
            answer = _answered(self._tool, self._codec.decode(tokens), row.problem)
        read = [] if answer is None else self._codec.encode_tool_answer(answer)
        fits = len(row.tokens) + len(read) < self._room
        row.over, row.ended = answer is None or not fits, ended and fits
        if not row.over:
            row.tokens += read
            row.log_probs += [0.0] * len(read)
            row.given += [True] * len(read)


def _answered(tool: Tool, text: str, problem: Problem) -> str | None:
    about = f"tool._target_, asked {text[:80]!r} about {problem.question[:80]!r},"
    with named_when_raised(lambda raised: ConfigError(f"{about} raised {raised}\nCorrect it there")):
        answer = tool(text, problem)
    rule = "a tool returns a text that the model reads, or None at the end of an episode"
    require(answer is None or isinstance(answer, str), "tool._target_", answer, rule, f"correct it: {about} gave that")
    return answer


def _group(rows: Sequence[_Row]) -> Group:
    longest = max(len(row.tokens) for row in rows)
    table = lambda of, dtype: torch.tensor([of(r) + [0] * (longest - len(of(r))) for r in rows], dtype=dtype)  # noqa: E731
    return Group(
        rows[0].prompt,
        table(lambda row: row.tokens, torch.long),
        torch.tensor([len(row.tokens) for row in rows]),
        table(lambda row: row.log_probs, torch.float32),
        torch.tensor([row.ended for row in rows]),
        table(lambda row: row.given, torch.bool),
    )


def run_episodes(policy: LanguagePolicy, episodes: Episodes, block: GenerationBlock, version: int) -> Completions:
    """Runs episodes to their end in this process; `block` says how tokens are drawn."""
    while (turn := episodes.turn()) is not None:
        asked = replace(block, prompts=turn.prompts, group_size=turn.group_size)
        episodes.take(tuple(Decoding(policy, asked).run()))
    return episodes.completions(version)


class EpisodeStage(HoldsNoMemory):
    """The opener of the loop with generation: asks the problems of the training stream, and is the tool.

    Which problems a block has is as in PromptStage.
    """

    def __init__(self, made: StageConfig) -> None:
        self._made, self._config = made, made.config

    def setup(self, context: StageContext) -> None:
        config, folder = self._config, self._made.folder
        self._per_round = context.num_blocks * config.prompts_per_block
        self._prompts = Prompts.of(config, folder, Split.train)
        kind = cast(type[LanguagePolicy], load_target(config.policy._target_))
        self._codec = kind.codec_from_config(config.policy, Path(folder) if folder else None)
        self._episodes: dict[int, Episodes] = {}
        self._version = 0

    def open(self, step_context: StepContext, blocks: Sequence[int]) -> Mapping[int, Turn | None]:
        """Returns each block's first turn."""
        count, size = self._config.prompts_per_block, self._config.rl.group_size
        start = cast(int, step_context.message or 0) + step_context.round * self._per_round
        asked = {block: self._prompts.batch(start + block * count, count) for block in blocks}
        self._episodes |= {b: Episodes(found, size, self._config, self._codec) for b, found in asked.items()}
        return {block: self._episodes[block].turn() for block in blocks}

    def step(
        self, step_context: StepContext, answers: Mapping[int, tuple[tuple[Group, ...], int] | None]
    ) -> Mapping[int, Turn | None]:
        """Returns each block's next turn; None where its episodes are over."""
        for block, answer in answers.items():
            if answer is not None:
                groups, self._version = answer
                self._episodes[block].take(groups)
        return {block: None if a is None else self._episodes[block].turn() for block, a in answers.items()}

    def close(self, step_context: StepContext, blocks: Mapping[int, None]) -> Output:
        """Returns the Completions of each block."""
        made = {block: self._episodes.pop(block).completions(self._version) for block in blocks}
        return Output(made, generation_report(made.values(), {}))
