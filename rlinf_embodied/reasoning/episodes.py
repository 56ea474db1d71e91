"""Episodes of several turns: the model writes, a tool or an agent answers, and the model continues after the answer.

    prompt     What is 12*4+50?
    turn 1     12*4= <eos>                  sampled
    tool       48;                          inserted
    turn 2     48+50= <eos>                 sampled
    tool       98;                          inserted
    turn 3     #98 <eos>                    sampled; the tool returns None, so the episode ends

Prompts and continuations are token ids throughout.  The prompt of each turn within a row is exactly the earlier tokens
of the row and the answer: no sampled token is decoded and encoded again, and inserted tokens are excluded from the
loss.  If the chat template writes earlier turns differently (for example without the model's thoughts), a new row
begins, whose prompt is what the template writes now.  An episode of one turn is a completion.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from rlinf_embodied.config import MathConfig
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.interfaces.language import ChatMessage, PromptCodec, TokenBatch, padded
from rlinf_embodied.reasoning.batch import (
    Completions,
    EngineLoad,
    GenerationBlock,
    Prompt,
    PromptedProblem,
    generation_report,
)
from rlinf_embodied.reasoning.engine import Engine, Generated, GeneratedTurn, generate
from rlinf_embodied.reasoning.prompt_stage import PromptStage
from rlinf_embodied.reasoning.tool_calls import ToolCalls
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


@dataclass(slots=True)
class Row:
    """A prompt and its continuation of L tokens, within an episode."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)  # L
    log_probs: list[float] = field(default_factory=list)  # L, 0 for inserted tokens
    given: list[bool] = field(default_factory=list)  # L, True for inserted tokens
    versions: list[int] = field(default_factory=list)  # L, of the weights; an inserted token has that of the one before
    support_sizes: list[int] = field(default_factory=list)  # L, as of Generated; 0 for inserted tokens
    support_ids: array[int] = field(default_factory=lambda: array("i"))
    ended: bool = False  # by the model; False: cut off by max_new_tokens or the context


class Episode:
    """One sample of a problem, turn by turn."""

    def __init__(
        self,
        prompted: PromptedProblem,
        sample: int,
        codec: PromptCodec,
        max_new_tokens: int,
        max_row_tokens: int | None,
        *,
        each_turn: bool,
    ) -> None:
        """Creates an episode without a turn; `sample` is its index among the problem's samples.

        `max_new_tokens` limits the continuation of a row, or with `each_turn` every turn; `max_row_tokens` limits a row
        with its prompt (None: no limit).
        """
        self.problem, self.first = prompted[0], replace(prompted[1], sample=sample)
        self.rows, self.turns = list[Row](), 0
        self.over = False  # whether there will be no further turn
        self.text = ""  # of the last turn
        self.agent_reward: float | None = None  # None: the reward stage scores the episode
        self._codec, self._each_turn = codec, each_turn
        self._max_new_tokens, self._max_row_tokens = max_new_tokens, max_row_tokens

    def next_prompt(self, chat: Sequence[ChatMessage]) -> Prompt | None:
        """Begins a turn after these messages; returns its prompt, or None if there is no room for a token."""
        row, inserted = self.rows[-1] if self.rows else None, None
        if row is not None and row.ended:
            inserted = self._codec.encode_next_turn([*row.prompt, *row.tokens], chat)
        is_new = row is None or inserted is None
        if row is None or inserted is None:
            row, inserted = Row(tuple(self._codec.encode_chat(chat))), []
        length = len(row.tokens) + len(inserted)
        room = self._max_new_tokens - (0 if self._each_turn else length)
        if self._max_row_tokens is not None:
            room = min(room, self._max_row_tokens - len(row.prompt) - length)
        if room < 1:
            return None
        if is_new:
            self.rows.append(row)
        row.tokens += inserted
        row.log_probs += [0.0] * len(inserted)
        row.given += [True] * len(inserted)
        row.versions += row.versions[-1:] * len(inserted)
        row.support_sizes += [0] * len(inserted)
        row.ended = False
        place = sum(len(earlier.tokens) for earlier in self.rows)
        return replace(self.first, tokens=(*row.prompt, *row.tokens), place=place, room=room)

    def add(self, generated: Generated) -> None:
        """Adds a generated turn."""
        row, tokens = self.rows[-1], generated.tokens
        row.tokens += tokens
        row.log_probs += generated.log_probs
        row.given += [False] * len(tokens)
        row.versions += generated.versions
        row.support_sizes += generated.support_sizes or [0] * len(tokens)
        row.support_ids += generated.support_ids
        row.ended = generated.ended
        self.turns += 1
        self.text = self._codec.decode(tokens)


class Episodes:
    """The episodes of K problems, G of each, numbered problem by problem; subclasses answer the model's turns."""

    def __init__(self, episodes: list[Episode]) -> None:
        self.episodes = episodes

    @property
    def over(self) -> bool:
        """Whether all episodes have ended."""
        return all(episode.over for episode in self.episodes)

    def turn(self, wait: bool = True) -> dict[int, Prompt]:
        """Returns the prompts of the next turn by episode number, in ascending order.

        With `wait` all episodes finish a turn before any is answered, and there is no prompt once all have ended.
        Without it the turn has the prompts that are ready.
        """
        raise NotImplementedError

    def take(self, rows: Mapping[int, Generated]) -> None:
        """Adds generated turns, by episode number."""
        raise NotImplementedError

    def finished(self) -> list[Episode]:
        """Returns all episodes, once they have ended."""
        return self.episodes

    def close(self) -> None:
        """Stops threads and servers that work for the episodes."""


class ToolEpisodes(Episodes):
    """Episodes in which a function answers the model's turns; without a tool they have one turn."""

    def __init__(
        self,
        problems: Sequence[PromptedProblem],
        group_size: int,
        config: MathConfig,
        codec: PromptCodec,
        calls: ToolCalls,
    ) -> None:
        """Creates the episodes; `config` limits turns and tokens, `calls` answers the turns."""
        limits = config.generation.max_new_tokens, codec.context_length
        super().__init__([Episode(p, g, codec, *limits, each_turn=False) for p in problems for g in range(group_size)])
        self._calls, self._max_turns = calls, config.tool.num_turns
        self._codec, self._template = codec, PromptTemplate.of(config.data)
        self._chats: dict[int, list[ChatMessage]] = {}  # by number, of the episodes that the tool has answered
        self._pending: dict[Future[str | None], int] = {}  # episode numbers by calls of the tool

    def turn(self, wait: bool = True) -> dict[int, Prompt]:
        if not self.episodes[0].rows:
            for episode in self.episodes:
                episode.rows.append(Row(episode.first.tokens))
            return {number: episode.first for number, episode in enumerate(self.episodes)}
        prompts: dict[int, Prompt] = {}
        while self._pending:
            ended = self._calls.ended(self._pending, wait)
            for call in ended:
                number, answer = self._pending.pop(call), call.result()
                prompt = None if answer is None else self._next_prompt(number, answer)
                if prompt is None:
                    self.episodes[number].over = True
                else:
                    prompts[number] = prompt
            if not ended:
                break
        return dict(sorted(prompts.items()))

    def _next_prompt(self, number: int, answer: str) -> Prompt | None:
        """Returns the prompt of an episode's next turn; None if there is no room for it."""
        episode = self.episodes[number]
        if number not in self._chats:
            problem = episode.problem
            self._chats[number] = self._codec.chat(self._template.prompt(problem), problem.history)
        self._chats[number].append({"role": "assistant", "content": episode.text})
        self._chats[number].append({"role": "tool", "content": answer})
        prompt = episode.next_prompt(self._chats[number])
        if prompt is None:
            episode.rows[-1].ended = False
        return prompt

    def take(self, rows: Mapping[int, Generated]) -> None:
        for number, generated in rows.items():
            episode = self.episodes[number]
            episode.add(generated)
            if episode.rows[-1].ended and episode.turns < self._max_turns:
                self._pending[self._calls.ask(episode.text, episode.problem)] = number
            else:
                episode.over = True


def completions_of(episodes: Sequence[Episode], group_size: int, version: int) -> Completions:
    """Returns the completions of K problems, G episodes each, problem by problem.

    `version` is that of the newest weights.
    """
    rows = [(row, number) for number, episode in enumerate(episodes) for row in episode.rows]
    column = lambda name: [getattr(row, name) for row, _ in rows]  # noqa: E731
    versions = column("versions")
    return Completions(
        problems=tuple(episode.problem for episode in episodes[::group_size]),
        texts=tuple(episode.text for episode in episodes),
        version=version,
        rows=TokenBatch.of(*map(column, ("prompt", "tokens", "given", "support_sizes", "support_ids"))),
        log_probs=padded(column("log_probs"), torch.float32),
        ended=torch.tensor(column("ended")),
        samples=tuple(number for _, number in rows),
        turns=sum(episode.turns for episode in episodes),
        agent_rewards=tuple(episode.agent_reward for episode in episodes),
        versions=padded(versions, torch.long) if set().union(*versions) - {version} else None,
    )


def run_episodes(engine: Engine, episodes: Episodes, group_size: int, block: GenerationBlock) -> Completions:
    """Runs episodes to their end in this process; `block` has the sampling and the keys of the noise."""
    while turn := episodes.turn():
        requests = replace(block, prompts=tuple(turn.values()))
        episodes.take(dict(zip(turn, generate(engine, requests), strict=True)))
    return completions_of(episodes.finished(), group_size, engine.version)


def episodes_of(
    problems: Sequence[PromptedProblem],
    group_size: int,
    config: MathConfig,
    codec: PromptCodec,
    calls: ToolCalls,
    max_row_tokens: int | None = None,
) -> Episodes:
    """Returns new episodes, which an agent drives if the config names one.

    `calls` are those of the config's tool; `max_row_tokens` limits the rows of an agent.
    """
    if config.agent._target_ is not None:
        from rlinf_embodied.reasoning.agents import AgentEpisodes  # imports an HTTP server

        limits = [limit for limit in (max_row_tokens, codec.context_length) if limit is not None]
        return AgentEpisodes(problems, group_size, config, codec, min(limits, default=None))
    return ToolEpisodes(problems, group_size, config, codec, calls)


class EpisodeStage(PromptStage):
    """Draws problems as PromptStage does, and answers the model's turns in a loop with generation."""

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._calls = ToolCalls(self._config.tool)
        self._episodes: dict[int, Episodes] = {}
        self._loads: dict[int, list[EngineLoad]] = {}  # by block
        self._version = 0

    def open(self, step_context: StepContext, blocks: Sequence[int]) -> Mapping[int, Mapping[int, Prompt]]:
        """Returns each block's first turn."""
        config, codec = self._config, self._prompts.codec
        for block in blocks:
            if (abandoned := self._episodes.pop(block, None)) is not None:  # by an attempt that did not finish
                abandoned.close()
            limits = self._calls, config.algorithm.tokens_per_microbatch
            problems = self._draw(step_context, block)
            self._episodes[block] = episodes_of(problems, config.rl.group_size, config, codec, *limits)
            self._loads[block] = []
        return {block: self._episodes[block].turn() for block in blocks}

    def step(
        self, step_context: StepContext, answers: Mapping[int, GeneratedTurn]
    ) -> Mapping[int, Mapping[int, Prompt]]:
        """Takes each block's turn; returns its next one, without prompts if its episodes have ended."""
        for block, answer in answers.items():
            self._version = answer.version
            self._episodes[block].take(answer.rows)
            self._loads[block].append(answer.load)
        return {block: self._episodes[block].turn() for block in answers}

    def close(self, step_context: StepContext, blocks: Mapping[int, None]) -> Output:
        """Returns the Completions of each block."""
        outputs = {}
        for block in blocks:
            episodes = self._episodes.pop(block)
            outputs[block] = completions_of(episodes.finished(), self._config.rl.group_size, self._version)
            episodes.close()
        loads = [load for block in blocks for load in self._loads.pop(block)]
        return Output(outputs, generation_report(outputs.values(), {}, loads))

    def leave(self) -> None:
        """Ends agents and tools that are still running."""
        for episodes in self._episodes.values():
            episodes.close()
        self._calls.close()
