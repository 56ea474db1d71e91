"""Problems with their prompts as tokens: which ones an iteration trains on, and which are too long for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import cast

from rlinf_embodied.config import DataConfig, MathConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy, PromptCodec
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import Asked, Prompt
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext

_FURTHER, _MOST_TRIES = 1 << 32, 100  # positions to the problem that replaces one that is too long


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is in the training stream: the message to its first stage."""

    used: int = 0  # problems
    pools: Mapping[str, bool] = field(default_factory=dict)  # by Problem.key: whether all completions were right; those
    # of which some were have no entry


class Prompts:
    """A split's stream of problems, without those whose prompts are too long.

    In a stream without end another problem of the split takes the place of such a one, always the same; a split with an
    end becomes shorter.  Of the problems that were last solved by all completions, or by none, only a share is drawn
    (data.solved_share, data.unsolved_share): chosen by keyed draws, so that position and pools decide.
    """

    def __init__(self, split: Split, data: DataConfig, seed: int, codec: PromptCodec, most: int, reason: str) -> None:
        """Opens the stream; prompts of more than `most` tokens are left out, for the `reason`."""
        self.codec, self._split, self._most, self._reason = codec, split, most, reason
        self._seed, self._shares = seed, {True: data.solved_share, False: data.unsolved_share}
        self._source, self._template = problem_source(data, seed), PromptTemplate.of(data)
        size = None if split is Split.train else self._source.size(split)
        self._held_out: list[Asked] | None = None
        if size is not None:
            every = [self._asked(problem) for problem in self._source.batch(split, 0, size)]
            self._held_out = [asked for asked in every if len(asked[1].tokens) <= most]
            if not self._held_out:
                raise self._none_fits([len(prompt.tokens) for _, prompt in every])

    @classmethod
    def of(cls, config: MathConfig, folder: str | None, split: Split) -> Prompts:
        """Returns the stream of training, or the held-out problems; of the policy only the tokenizer is loaded.

        Raises:
            ConfigError: the problems cannot be had.
            DataError: a file cannot be used.
        """
        policy, generation, trained = config.policy, config.generation, split is Split.train
        kind = cast(type[LanguagePolicy], load_target(policy._target_))
        codec = kind.codec_from_config(policy, None if folder is None else Path(folder))
        limits = [(codec.context_length, "the context of the model holds {} tokens")]
        if trained:
            limits.append((config.algorithm.tokens_per_microbatch, "algorithm.tokens_per_microbatch is {}"))
        tokens, text = min(((most, text) for most, text in limits if most), default=(1 << 40, ""))
        reason = f"{text.format(tokens)}, and completions have up to {generation.max_new_tokens=} tokens"
        seed, most = config.run.seed if trained else config.data.seed, tokens - generation.max_new_tokens
        if config.data.max_prompt_tokens is not None and config.data.max_prompt_tokens < most:
            most, reason = config.data.max_prompt_tokens, "data.max_prompt_tokens leaves out longer prompts"
        return cls(split, config.data, seed, codec, most, reason)

    def batch(self, start: int, count: int, pools: Mapping[str, bool] = MappingProxyType({})) -> list[Asked]:
        """Returns the problems at positions start .. start + count - 1 of the stream, with their prompts.

        Raises:
            ConfigError: hardly a prompt fits.
        """
        if self._held_out is not None:
            return self._held_out[start : start + count]
        drawn = enumerate(self._source.batch(self._split, start, count), start)
        return [self._fitting(position, problem, pools) for position, problem in drawn]

    def _asked(self, problem: Problem) -> Asked:
        chat = self.codec.chat(self._template.prompt(problem), problem.history)
        return problem, Prompt(problem.id, tuple(self.codec.encode_chat(chat)))

    def _fitting(self, position: int, problem: Problem, pools: Mapping[str, bool]) -> Asked:
        lengths, fitting = [], None
        for number in range(1, _MOST_TRIES + 1):
            asked = self._asked(problem)
            lengths.append(len(asked[1].tokens))
            if lengths[-1] <= self._most:
                fitting = asked
                pool = pools.get(problem.key)
                share = 1.0 if pool is None else self._shares.get(pool, 1.0)
                if share == 1 or float(uniform(self._seed, "pools", position, number)) < share:
                    return asked
            (problem,) = self._source.batch(self._split, position + number * _FURTHER, 1)
        if fitting is not None:  # hardly any problem is in no pool
            return fitting
        raise self._none_fits(lengths)

    def _none_fits(self, lengths: Sequence[int]) -> ConfigError:
        shortest = min(lengths, default=self._most)
        return ConfigError(
            f"{self._reason}, but the shortest of {len(lengths)} prompts for the split {self._split.value!r} has "
            f"{shortest} tokens: use at least {shortest - self._most} more tokens there, fewer new ones, or shorter "
            "problems"
        )


class PromptStage(HoldsNoMemory):
    """Takes problems from the training stream: block b of round r has those at start + (r B + b) K ... of it.

    `start` is how many problems the run has used so far, by the step_context's message, a Position.  With partial
    rollouts (episodes.carried) the first ones of the block's next round follow: they are begun ahead.
    """

    def __init__(self, made: StageConfig) -> None:
        self._made, self._config = made, made.config

    def setup(self, context: StageContext) -> None:
        self._num_blocks = context.num_blocks
        self._prompts = Prompts.of(self._config, self._made.folder, Split.train)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Batch of each block: its problems with their prompts, among those that decode with them."""
        size, made = self._config.blocks_per_batch, {}
        for first in sorted({block // size * size for block in inputs}):
            blocks = range(first, min(first + size, self._num_blocks))
            asked = tuple(self._drawn(step_context, block) for block in blocks)
            made |= {block: asked for block in blocks if block in inputs}
        return Output(made)

    def _drawn(self, step_context: StepContext, block: int) -> tuple[Asked, ...]:
        position, config = cast(Position, step_context.message or Position()), self._config
        count, carried = config.prompts_per_block, config.carried_per_block
        per_round = self._num_blocks * count
        start = position.used + step_context.round * per_round + block * count
        own = self._prompts.batch(start, count, position.pools)
        return (*own, *(self._prompts.batch(start + per_round, carried, position.pools) if carried else ()))
