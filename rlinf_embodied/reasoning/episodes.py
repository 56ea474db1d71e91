"""Episodes of several turns: the model writes, a tool or an agent answers, and the model continues after what it reads.

    prompt     What is 12*4+50?
    turn 1     12*4= <eos>                  sampled
    tool       48;                          given
    turn 2     48+50= <eos>                 sampled
    tool       98;                          given
    turn 3     #98 <eos>                    sampled: the tool has nothing to say, so the episode ends

Prompt and continuation are token ids throughout.  A row is a stretch in which each turn's prompt is exactly what was
said before and more: no sampled token is ever decoded and encoded again, and given ones are left out of the loss.
Where the chat template writes earlier turns differently (without the model's thoughts, say), another row begins, whose
prompt is what the template writes now.  An episode of one turn is a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

import torch

from rlinf_embodied.config import MathConfig, ToolConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import ChatMessage, LanguagePolicy, PromptCodec
from rlinf_embodied.plug_ins import load_plug_in, load_target, named_when_raised
from rlinf_embodied.reasoning.batch import Asked, Completions, GenerationBlock, Group, Prompt, Turn, generation_report
from rlinf_embodied.reasoning.generation import Decoding
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Position, Prompts
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
class Row:
    """A stretch of an episode: a prompt and its continuation."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0 for given tokens
    given: list[bool] = field(default_factory=list)
    ended: bool = False  # by the model; else max_new_tokens or its context cut it off

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], given: bool) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.given += [given] * len(tokens)


class Episode:
    """One sample of a problem, turn by turn."""

    def __init__(
        self, asked: Asked, sample: int, codec: PromptCodec, longest: int, most: int | None, *, each_turn: bool
    ) -> None:
        """Begins without a turn.

        Args:
            longest: tokens behind a row's prompt, or with `each_turn` of every turn.
            most: of a row, its prompt included; None: no limit.
        """
        self.problem, self.first = asked
        self.sample, self.rows, self.turns = sample, list[Row](), 0
        self.text = ""  # of the last turn
        self._codec, self._longest, self._most, self._each_turn = codec, longest, most, each_turn

    def begin(self) -> None:
        """Asks for a turn after the problem's own prompt."""
        self.rows.append(Row(self.first.tokens))

    def ask(self, chat: Sequence[ChatMessage]) -> Prompt | None:
        """Returns the prompt of the turn after these messages; None where there is no room for a token of it."""
        row = self.rows[-1] if self.rows else None
        more = None
        if row is not None and row.ended:
            more = self._codec.encode_next_turn([*row.prompt, *row.tokens], chat)
        if row is None or more is None:
            row, more = Row(tuple(self._codec.encode_chat(chat))), []
        whole = len(row.prompt) + len(row.tokens) + len(more)
        room = self._longest - (0 if self._each_turn else len(row.tokens) + len(more))
        room = room if self._most is None else min(room, self._most - whole)
        if room < 1:
            return None
        place = sum(len(earlier.tokens) for earlier in self.rows) + len(more)
        row.add(more, [0.0] * len(more), given=True)
        row.ended = False
        if not self.rows or self.rows[-1] is not row:
            self.rows.append(row)
        return Prompt(self.first.id, (*row.prompt, *row.tokens), self.sample, place, room)

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], ended: bool) -> None:
        """Takes a turn."""
        self.rows[-1].add(tokens, log_probs, given=False)
        self.rows[-1].ended = ended
        self.turns += 1
        self.text = self._codec.decode(tokens)


class Episodes(Protocol):
    """The episodes of K problems, G of each, turn by turn: all of them end a turn before any is answered."""

    def turn(self) -> Turn | None:
        """Returns what the model is to continue; None where all episodes are over."""
        ...

    def take(self, groups: Sequence[Group]) -> None:
        """Takes the turns that were asked for, in order."""
        ...

    def completions(self, version: int) -> Completions:
        """Returns the episodes, K groups of G."""
        ...

    def close(self) -> None:
        """Ends what is still at work for them."""
        ...


class ToolEpisodes:
    """Episodes in which a function answers the model's turns, or in which there is but one turn."""

    def __init__(self, asked: Sequence[Asked], group_size: int, config: MathConfig, codec: PromptCodec) -> None:
        """Begins; `config` says which tool there is, how many turns, and how many tokens an episode has."""
        self._asked, self._group_size = asked, group_size
        self._tool, self._most_turns = tool_of(config.tool), config.tool.num_turns
        longest, template = config.generation.max_new_tokens, PromptTemplate.of(config.data)
        limits = longest, codec.context_length
        self._all = [Episode(one, g, codec, *limits, each_turn=False) for one in asked for g in range(group_size)]
        chats = [codec.chat(template.prompt(problem), problem.history) for problem, _ in asked]
        self._chats = [chat for chat in chats for _ in range(group_size)]
        self._next: list[tuple[int, Prompt]] = []  # episodes that are not over, and their turns' prompts

    def turn(self) -> Turn | None:
        if not self._all[0].rows:
            for episode in self._all:
                episode.begin()
            self._next = [(number, episode.first) for number, episode in enumerate(self._all)]
            return Turn(tuple(prompt for _, prompt in self._asked), self._group_size)
        return Turn(tuple(prompt for _, prompt in self._next), 1) if self._next else None

    def take(self, groups: Sequence[Group]) -> None:
        live, self._next = self._next, []
        for (number, _), (tokens, log_probs, ended) in zip(live, turns_of(groups), strict=True):
            episode = self._all[number]
            episode.add(tokens, log_probs, ended)
            if ended and episode.turns < self._most_turns and self._tool is not None:
                answer = _answered(self._tool, episode.text, episode.problem)
                if answer is not None:
                    said = [{"role": "assistant", "content": episode.text}, {"role": "tool", "content": answer}]
                    self._chats[number] = [*self._chats[number], *said]
                    if (prompt := episode.ask(self._chats[number])) is not None:
                        self._next.append((number, prompt))
                    else:
                        episode.rows[-1].ended = False
            report_progress()

    def completions(self, version: int) -> Completions:
        return completions_of(self._all, self._group_size, version)

    def close(self) -> None: ...


def turns_of(groups: Sequence[Group]) -> list[tuple[list[int], list[float], bool]]:
    """Returns tokens, log-probs and whether it ended, of each row of generated groups."""
    made = []
    for group in groups:
        tables = (group.tokens.tolist(), group.log_probs.tolist(), group.lengths.tolist(), group.ended.tolist())
        made += [(tokens[:n], log_probs[:n], ended) for tokens, log_probs, n, ended in zip(*tables, strict=True)]
    return made


def _answered(tool: Tool, text: str, problem: Problem) -> str | None:
    about = f"tool._target_, asked {text[:80]!r} about {problem.question[:80]!r},"
    with named_when_raised(lambda raised: ConfigError(f"{about} raised {raised}\nCorrect it there")):
        answer = tool(text, problem)
    rule = "a tool returns a text that the model reads, or None at the end of an episode"
    require(answer is None or isinstance(answer, str), "tool._target_", answer, rule, f"correct it: {about} gave that")
    return answer


def completions_of(
    episodes: Sequence[Episode], group_size: int, version: int, earned: Sequence[float | None] | None = None
) -> Completions:
    """Returns episodes, sample by sample, as groups; a text is that of the last turn."""
    parts = [episodes[first : first + group_size] for first in range(0, len(episodes), group_size)]
    return Completions(
        tuple(part[0].problem for part in parts),
        tuple(_group(part) for part in parts),
        tuple(episode.text for episode in episodes),
        version,
        sum(episode.turns for episode in episodes),
        None if earned is None else tuple(earned),
    )


def _group(episodes: Sequence[Episode]) -> Group:
    rows = [(row, episode.sample) for episode in episodes for row in episode.rows]
    longest = max(len(row.tokens) for row, _ in rows)
    table = lambda of, dtype: torch.tensor([of(r) + [0] * (longest - len(of(r))) for r, _ in rows], dtype=dtype)  # noqa: E731
    first, samples = episodes[0].first, tuple(sample for _, sample in rows)
    alike = all(row.prompt == first.tokens for row, _ in rows)
    return Group(
        first,
        table(lambda row: row.tokens, torch.long),
        torch.tensor([len(row.tokens) for row, _ in rows]),
        table(lambda row: row.log_probs, torch.float32),
        torch.tensor([row.ended for row, _ in rows]),
        table(lambda row: row.given, torch.bool) if any(any(row.given) for row, _ in rows) else None,
        None if alike else tuple(row.prompt for row, _ in rows),
        None if samples == tuple(range(len(episodes))) else samples,
    )


def run_episodes(policy: LanguagePolicy, episodes: Episodes, block: GenerationBlock, version: int) -> Completions:
    """Runs episodes to their end in this process; `block` says how tokens are drawn."""
    while (turn := episodes.turn()) is not None:
        asked = replace(block, prompts=turn.prompts, group_size=turn.group_size)
        episodes.take(tuple(Decoding(policy, asked).run()))
    return episodes.completions(version)


def episodes_of(
    asked: Sequence[Asked], group_size: int, config: MathConfig, codec: PromptCodec, most: int | None = None
) -> Episodes:
    """Returns new episodes: an agent's where there is one; their rows have up to `most` tokens, and the context's."""
    if config.agent._target_ is not None:
        from rlinf_embodied.reasoning.agents import AgentEpisodes  # it has a server

        limits = [limit for limit in (most, codec.context_length) if limit is not None]
        return AgentEpisodes(asked, group_size, config, codec, min(limits, default=None))
    return ToolEpisodes(asked, group_size, config, codec)


class EpisodeStage(HoldsNoMemory):
    """The opener of the loop with generation: asks the problems of the training stream, and answers the model's turns.

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
        position = cast(Position, step_context.message or Position())
        start = position.used + step_context.round * self._per_round
        for block in blocks:
            if (given_up := self._episodes.pop(block, None)) is not None:  # of an attempt that was not finished
                given_up.close()
            asked = self._prompts.batch(start + block * count, count, position.pools)
            most = self._config.algorithm.tokens_per_microbatch
            self._episodes[block] = episodes_of(asked, size, self._config, self._codec, most)
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
        made = {}
        for block in blocks:
            episodes = self._episodes.pop(block)
            made[block] = episodes.completions(self._version)
            episodes.close()
        return Output(made, generation_report(made.values(), {}))

    def leave(self) -> None:
        """Ends agents that are still at work."""
        for episodes in self._episodes.values():
            episodes.close()
