"""Problems with tokenized prompts: which ones an iteration trains on, and which are too long for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import cast

from rlinf_embodied.config import MathConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import Prompt, PromptedProblem
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext

_REPLACEMENT_OFFSET = 1 << 32  # from the position of a problem that is too long to that of its replacement
_MAX_DRAWS = 100  # for one position


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in the training stream: the message to its first stage."""

    used: int = 0  # number of problems drawn
    # by Problem.key: True if all completions were right, False if none was; problems in between have no entry
    pools: Mapping[str, bool] = field(default_factory=dict)


class Prompts:
    """The stream of problems of a split, without problems whose prompts are too long.

    In an endless stream such a problem is replaced by another one of the split, which its position determines; a finite
    split becomes smaller.  Of the problems that all completions solved the last time, or none, only a fraction is drawn
    (data.solved_share, data.unsolved_share).  The draws are keyed, so that position and pools determine the problem.
    """

    def __init__(self, config: MathConfig, folder: str | None, split: Split) -> None:
        """Opens the training stream or the held-out problems; loads only the policy's tokenizer.

        Raises:
            ConfigError: there are no such problems, or none fits.
            DataError: a file cannot be used.
        """
        policy, data, generation, trained = config.policy, config.data, config.generation, split is Split.train
        policy_class = cast(type[LanguagePolicy], load_target(policy._target_))
        self.codec = policy_class.codec_from_config(policy, None if folder is None else Path(folder))
        limits = [(self.codec.context_length, "the context of the model holds {} tokens")]
        if trained:
            limits.append((config.algorithm.tokens_per_microbatch, "algorithm.tokens_per_microbatch is {}"))
        tokens, text = min(((limit, text) for limit, text in limits if limit), default=(1 << 40, ""))
        self._reason = f"{text.format(tokens)}, and completions have up to {generation.max_new_tokens=} tokens"
        self._max_tokens = tokens - generation.max_new_tokens
        if data.max_prompt_tokens is not None and data.max_prompt_tokens < self._max_tokens:
            self._max_tokens, self._reason = data.max_prompt_tokens, "data.max_prompt_tokens omits longer prompts"
        self._split, self._seed = split, config.run.seed if trained else data.seed
        self._shares = {True: data.solved_share, False: data.unsolved_share}
        self._source, self._template = problem_source(data, self._seed), PromptTemplate.of(data)
        size = None if trained else self._source.size(split)
        self._held_out: list[PromptedProblem] | None = None
        if size is not None:
            problems = [self._with_prompt(problem) for problem in self._source.batch(split, 0, size)]
            self._held_out = [prompted for prompted in problems if len(prompted[1].tokens) <= self._max_tokens]
            if not self._held_out:
                raise self._none_fits([len(prompt.tokens) for _, prompt in problems])

    def batch(self, start: int, count: int, pools: Mapping[str, bool] = MappingProxyType({})) -> list[PromptedProblem]:
        """Returns the problems at positions start .. start + count - 1 of the stream, with their prompts.

        Raises:
            ConfigError: almost no prompt fits.
        """
        if self._held_out is not None:
            return self._held_out[start : start + count]
        problems = enumerate(self._source.batch(self._split, start, count), start)
        return [self._fitting(position, problem, pools) for position, problem in problems]

    def _with_prompt(self, problem: Problem) -> PromptedProblem:
        chat = self.codec.chat(self._template.prompt(problem), problem.history)
        return problem, Prompt(problem.id, tuple(self.codec.encode_chat(chat)))

    def _fitting(self, position: int, problem: Problem, pools: Mapping[str, bool]) -> PromptedProblem:
        lengths, fitting = [], None
        for number in range(1, _MAX_DRAWS + 1):
            prompted = self._with_prompt(problem)
            lengths.append(len(prompted[1].tokens))
            if lengths[-1] <= self._max_tokens:
                fitting = prompted
                pool = pools.get(problem.key)
                share = 1.0 if pool is None else self._shares.get(pool, 1.0)
                if share == 1 or float(uniform(self._seed, "pools", position, number)) < share:
                    return prompted
            (problem,) = self._source.batch(self._split, position + number * _REPLACEMENT_OFFSET, 1)
        if fitting is not None:  # almost all problems are in a pool
            return fitting
        raise self._none_fits(lengths)

    def _none_fits(self, lengths: Sequence[int]) -> ConfigError:
        shortest = min(lengths, default=self._max_tokens)
        return ConfigError(
            f"{self._reason}, but the shortest of {len(lengths)} prompts for the split {self._split.value!r} has "
            f"{shortest} tokens: use at least {shortest - self._max_tokens} more tokens there, fewer new ones, or "
            "shorter problems"
        )


class PromptStage(HoldsNoMemory):
    """Draws problems from the training stream.

    With B blocks of K problems, block b of round r has the problems from position start + (r B + b) K on; the message
    of the step_context, a Position, has the start.  A profile sends none: its iterations have successive problems, so
    that their seconds vary as those of a training.  With partial rollouts (episodes.carried) the first problems of the
    block's next round follow, which are begun early.
    """

    def __init__(self, stage_config: StageConfig) -> None:
        self._stage_config, self._config = stage_config, stage_config.config

    def setup(self, context: StageContext) -> None:
        self._num_blocks = context.num_blocks
        self._prompts = Prompts(self._config, self._stage_config.folder, Split.train)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Batch of each block: the problems of all blocks that decode with it, and its own."""
        size, outputs = self._config.blocks_per_batch, {}
        for first in sorted({block // size * size for block in inputs}):
            blocks = range(first, min(first + size, self._num_blocks))
            batch = tuple(self._draw(step_context, block) for block in blocks)
            outputs |= {block: batch for block in blocks if block in inputs}
        return Output(outputs)

    def _draw(self, step_context: StepContext, block: int) -> tuple[PromptedProblem, ...]:
        count, carried = self._config.prompts_per_block, self._config.carried_per_block
        per_round = self._num_blocks * count
        position = cast(Position, step_context.message or Position(step_context.iteration * per_round))
        start = position.used + step_context.round * per_round + block * count
        problems = self._prompts.batch(start, count, position.pools)
        return (*problems, *(self._prompts.batch(start + per_round, carried, position.pools) if carried else ()))
