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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import torch

from rlinf_embodied.config import MathConfig
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.interfaces.language import ChatMessage, PromptCodec, TokenBatch, padded
from rlinf_embodied.reasoning.batch import Asked, Completions, GenerationBlock, Prompt, Turn, generation_report
from rlinf_embodied.reasoning.engine import Engine, Generated, generate
from rlinf_embodied.reasoning.prompt_stage import PromptStage
from rlinf_embodied.reasoning.tool_calls import Answers, ToolCalls
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


@dataclass(slots=True)
class Row:
    """A stretch of an episode: a prompt and its continuation, token by token."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0 for given tokens
    given: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights; of given tokens those before them
    ended: bool = False  # by the model; else max_new_tokens or its context cut it off


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
        self.earned: float | None = None  # the reward that an agent gave; None: the verifier gives one
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
        row.tokens += more
        row.log_probs += [0.0] * len(more)
        row.given += [True] * len(more)
        row.versions += row.versions[-1:] * len(more)
        row.ended = False
        if not self.rows or self.rows[-1] is not row:
            self.rows.append(row)
        return Prompt(self.first.id, (*row.prompt, *row.tokens), self.sample, place, room)

    def add(self, said: Generated) -> None:
        """Takes a turn."""
        row, tokens = self.rows[-1], said.tokens.tolist()
        row.tokens += tokens
        row.log_probs += said.log_probs.tolist()
        row.given += [False] * len(tokens)
        row.versions += said.versions.tolist()
        row.ended = said.ended
        self.turns += 1
        self.text = self._codec.decode(tokens)


class Episodes(Protocol):
    """The episodes of K problems, G of each, numbered problem by problem."""

    @property
    def over(self) -> bool:
        """Whether there will be no further turn."""
        ...

    def turn(self, wait: bool = True) -> Turn | None:
        """Returns what the model is to continue.

        With `wait` all episodes end a turn before any is answered, and None says that all are over.  Without, it is
        what can be continued at this moment; None: nothing yet.
        """
        ...

    def take(self, said: Mapping[int, Generated]) -> None:
        """Takes turns that were asked for, by the episodes' numbers."""
        ...

    def finished(self) -> list[Episode]:
        """Returns all episodes, which are over."""
        ...

    def close(self) -> None:
        """Ends what is still at work for them."""
        ...


class ToolEpisodes:
    """Episodes in which a function answers the model's turns, or in which there is but one turn."""

    def __init__(
        self, asked: Sequence[Asked], group_size: int, config: MathConfig, codec: PromptCodec, calls: ToolCalls | None
    ) -> None:
        """Begins; `config` says how many turns, and how many tokens an episode has, and `calls` answer the turns."""
        self._asked, self._group_size = asked, group_size
        self._calls, self._most_turns = calls, config.tool.num_turns
        self._codec, self._template = codec, PromptTemplate.of(config.data)
        limits = config.generation.max_new_tokens, codec.context_length
        self._all = [Episode(one, g, codec, *limits, each_turn=False) for one in asked for g in range(group_size)]
        self._chats: dict[int, list[ChatMessage]] = {}  # of the episodes that a tool has answered
        self._answers: Answers = Answers()
        self._at_tool = 0  # episodes that wait for the tool
        self._at_model = 0  # those that wait for the model

    @property
    def over(self) -> bool:
        return bool(self._all[0].rows) and not (self._at_tool or self._at_model)

    def turn(self, wait: bool = True) -> Turn | None:
        if not self._all[0].rows:
            for episode in self._all:
                episode.begin()
            self._at_model = len(self._all)
            return Turn(tuple(prompt for _, prompt in self._asked), self._group_size, tuple(range(self._at_model)))
        found: dict[int, Prompt] = {}
        while self._at_tool and self._calls is not None:
            answered = self._calls.next_answer(self._answers, wait)
            if answered is None:
                break
            self._at_tool -= 1
            number, answer = cast(tuple[int, str | None], answered)
            if (prompt := self._asks(number, answer)) is not None:
                found[number] = prompt
        self._at_model += len(found)
        numbers = tuple(sorted(found))
        return Turn(tuple(found[number] for number in numbers), 1, numbers) if found else None

    def _asks(self, number: int, answer: str | None) -> Prompt | None:
        """Returns the prompt of an episode's next turn; None where it is over."""
        episode = self._all[number]
        if answer is None:
            return None
        if number not in self._chats:
            problem = episode.problem
            self._chats[number] = self._codec.chat(self._template.prompt(problem), problem.history)
        said = [{"role": "assistant", "content": episode.text}, {"role": "tool", "content": answer}]
        self._chats[number] = [*self._chats[number], *said]
        prompt = episode.ask(self._chats[number])
        if prompt is None:
            episode.rows[-1].ended = False
        return prompt

    def take(self, said: Mapping[int, Generated]) -> None:
        for number, turn in said.items():
            episode = self._all[number]
            episode.add(turn)
            self._at_model -= 1
            if episode.rows[-1].ended and episode.turns < self._most_turns and self._calls is not None:
                self._calls.ask(self._answers, number, episode.text, episode.problem)
                self._at_tool += 1

    def finished(self) -> list[Episode]:
        return self._all

    def close(self) -> None: ...


def completions_of(episodes: Sequence[Episode], group_size: int, version: int) -> Completions:
    """Returns the episodes of K problems, G of each, problem by problem; `version` is the last one of the weights."""
    rows = [(row, number) for number, episode in enumerate(episodes) for row in episode.rows]
    column = lambda name: [getattr(row, name) for row, _ in rows]  # noqa: E731
    versions = column("versions")
    return Completions(
        problems=tuple(episode.problem for episode in episodes[::group_size]),
        texts=tuple(episode.text for episode in episodes),
        version=version,
        rows=TokenBatch.of(column("prompt"), column("tokens"), column("given")),
        log_probs=padded(column("log_probs"), torch.float32),
        ended=torch.tensor(column("ended")),
        samples=tuple(number for _, number in rows),
        turns=sum(episode.turns for episode in episodes),
        earned=tuple(episode.earned for episode in episodes),
        versions=padded(versions, torch.long) if set().union(*versions) - {version} else None,
    )


def run_episodes(engine: Engine, episodes: Episodes, block: GenerationBlock) -> Completions:
    """Runs episodes to their end in this process; `block` says how tokens are drawn."""
    while (turn := episodes.turn()) is not None:
        asked = replace(block, prompts=turn.prompts, group_size=turn.group_size)
        episodes.take(dict(zip(turn.numbers, generate(engine, asked), strict=True)))
    return completions_of(episodes.finished(), block.group_size, engine.version)


def episodes_of(
    asked: Sequence[Asked],
    group_size: int,
    config: MathConfig,
    codec: PromptCodec,
    calls: ToolCalls | None = None,
    most: int | None = None,
) -> Episodes:
    """Returns new episodes: an agent's where there is one, whose rows have up to `most` tokens and the context's.

    `calls` are those of the config's tool, if it has one.
    """
    if config.agent._target_ is not None:
        from rlinf_embodied.reasoning.agents import AgentEpisodes  # it has a server

        limits = [limit for limit in (most, codec.context_length) if limit is not None]
        return AgentEpisodes(asked, group_size, config, codec, min(limits, default=None))
    return ToolEpisodes(asked, group_size, config, codec, calls)


class EpisodeStage(PromptStage):
    """The opener of the loop with generation: asks problems as PromptStage does, and answers the model's turns."""

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._calls = ToolCalls.of(self._config.tool)
        self._episodes: dict[int, Episodes] = {}
        self._version = 0

    def open(self, step_context: StepContext, blocks: Sequence[int]) -> Mapping[int, Turn | None]:
        """Returns each block's first turn."""
        config, codec = self._config, self._prompts.codec
        for block in blocks:
            if (given_up := self._episodes.pop(block, None)) is not None:  # of an attempt that was not finished
                given_up.close()
            limits = self._calls, config.algorithm.tokens_per_microbatch
            asked = self._drawn(step_context, block)
            self._episodes[block] = episodes_of(asked, config.rl.group_size, config, codec, *limits)
        return {block: self._episodes[block].turn() for block in blocks}

    def step(
        self, step_context: StepContext, answers: Mapping[int, tuple[Mapping[int, Generated], int] | None]
    ) -> Mapping[int, Turn | None]:
        """Returns each block's next turn; None where its episodes are over."""
        for block, answer in answers.items():
            if answer is not None:
                said, self._version = answer
                self._episodes[block].take(said)
        return {block: None if a is None else self._episodes[block].turn() for block, a in answers.items()}

    def close(self, step_context: StepContext, blocks: Mapping[int, None]) -> Output:
        """Returns the Completions of each block."""
        made = {}
        for block in blocks:
            episodes = self._episodes.pop(block)
            made[block] = completions_of(episodes.finished(), self._config.rl.group_size, self._version)
            episodes.close()
        return Output(made, generation_report(made.values(), {}))

    def leave(self) -> None:
        """Ends agents that are still at work."""
        for episodes in self._episodes.values():
            episodes.close()
        if self._calls is not None:
            self._calls.close()
