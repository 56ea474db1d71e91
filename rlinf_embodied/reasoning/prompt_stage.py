"""Problems with their prompts as tokens: which ones an iteration trains on, and which are too long for the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rlinf_embodied.config import DataConfig, Engine, GenerationConfig, LanguagePolicyConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import prompt_template
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError, DataError
from rlinf_embodied.interfaces.language import LanguagePolicy, PromptCodec
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.batch import Prompt, PromptSet
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

Asked = tuple[Problem, Prompt]
_FURTHER, _MOST_TRIES = 1 << 32, 100  # positions to the problem that replaces one that is too long
_LOOKED_AT = 2000  # of the problems of a stream without end


@dataclass(frozen=True, slots=True)
class Limit:
    """The most tokens of a prompt with its completion, and the config path that sets it, with its value."""

    tokens: int
    path: str
    new_tokens: int  # of the completion

    @property
    def prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.tokens - self.new_tokens


class PromptSource:
    """The streams of a problem source, without the problems whose prompts are too long.

    In a stream without end another problem of the split takes the place of such a one, always the same; a split with an
    end becomes shorter.
    """

    def __init__(self, data: DataConfig, seed: int, codec: PromptCodec, limit: Limit | None) -> None:
        """Opens the streams; see `problem_source` for what it raises."""
        self._source, self._codec, self._limit = problem_source(data, seed), codec, limit
        self._template = prompt_template(data.prompt_template)
        self._fitting: dict[Split, list[Asked]] = {}

    def size(self, split: Split) -> int | None:
        """Returns how many prompts a held-out split has; None: there is always a next one."""
        whole = self._source.size(split)
        if split is Split.train or whole is None:
            return None
        if split not in self._fitting:
            every = map(self._asked, self._source.batch(split, 0, whole)) if whole else ()
            self._fitting[split] = [asked for asked in every if self._fits(asked)]
        return len(self._fitting[split])

    def batch(self, split: Split, start: int, count: int) -> list[Asked]:
        """Returns the problems at positions start .. start + count - 1 of the split's stream, with their prompts.

        Raises:
            DataError: hardly a prompt fits.
        """
        if self.size(split) is not None:
            return self._fitting[split][start : start + count]
        found = [self._asked(problem) for problem in self._source.batch(split, start, count)]
        return [
            asked if self._fits(asked) else self._further(split, start + number) for number, asked in enumerate(found)
        ]

    def too_long(self, split: Split, most: int | None = None) -> tuple[int, int]:
        """Returns how many of a split's problems are too long, and how many were looked at: at most 2,000 or `most`.

        Raises:
            ConfigError: all of them are.
        """
        size = self._source.size(split)
        number = min(n for n in (most, _LOOKED_AT if size is None else size) if n is not None)
        lengths = [len(self._asked(problem)[1].tokens) for problem in self._source.batch(split, 0, number)]
        if self._limit is None or not lengths:
            return 0, number
        if min(lengths) > self._limit.prompt:
            shortest = min(lengths) + self._limit.new_tokens
            raise ConfigError(
                f"{self._limit.path}, but the shortest of {number} prompts for the split {split.value!r} with its "
                f"completion may have {shortest} tokens (generation.max_new_tokens={self._limit.new_tokens}), and none "
                f"is cut: use at least {shortest} there, fewer new tokens, or shorter problems"
            )
        return sum(length > self._limit.prompt for length in lengths), number

    def _asked(self, problem: Problem) -> Asked:
        return problem, Prompt(problem.id, tuple(self._codec.encode(self._template.prompt(problem))))

    def _fits(self, asked: Asked) -> bool:
        return self._limit is None or len(asked[1].tokens) <= self._limit.prompt

    def _further(self, split: Split, position: int) -> Asked:
        for number in range(1, _MOST_TRIES + 1):
            (problem,) = self._source.batch(split, position + number * _FURTHER, 1)
            if self._fits(asked := self._asked(problem)):
                return asked
        assert self._limit is not None
        raise DataError(
            f"{self._limit.path}, and {_MOST_TRIES} problems in a row have prompts of more than {self._limit.prompt} "
            "tokens: use a larger value, fewer generation.max_new_tokens, or shorter problems"
        )


def codec_of(policy: LanguagePolicyConfig, folder: str | None) -> PromptCodec:
    """Returns what encodes the prompts of a policy; its weights are not loaded."""
    kind = cast(type[LanguagePolicy], load_target(policy._target_))
    return kind.codec_from_config(policy, None if folder is None else Path(folder))


@dataclass(frozen=True, slots=True)
class PromptStageConfig:
    """What the stage needs to know."""

    data: DataConfig
    policy: LanguagePolicyConfig
    folder: str  # of the policy
    seed: int
    prompts_per_block: int
    blocks_per_batch: int
    limits: tuple[Limit, ...]  # beyond the model's context
    max_new_tokens: int


def tightest(codec: PromptCodec, max_new_tokens: int, limits: tuple[Limit, ...]) -> Limit | None:
    """Returns the limit that counts, of the model's context and others."""
    if (context := codec.context_length) is not None:
        limits = (Limit(context, f"the context of the model holds {context} tokens", max_new_tokens), *limits)
    return min(limits, key=lambda limit: limit.tokens, default=None)


def engine_limits(generation: GenerationConfig, engine: Engine) -> tuple[Limit, ...]:
    """Returns the limit of an engine, if it has one."""
    most = generation.vllm.max_model_len if engine is Engine.vllm else None
    path = f"generation.vllm.max_model_len is {most}"
    return () if most is None else (Limit(most, path, generation.max_new_tokens),)


class PromptStage:
    """Takes problems from the training stream: block b of round r has those at start + (r B + b) K ... of it.

    `start` is the step_context's message: how many problems the run has used so far.
    """

    def __init__(self, config: PromptStageConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Opens the stream."""
        config = self._config
        self._num_blocks = context.num_blocks
        codec = codec_of(config.policy, config.folder)
        limit = tightest(codec, config.max_new_tokens, config.limits)
        self._source = PromptSource(config.data, config.seed, codec, limit)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the PromptSet of each block."""
        per_round = self._num_blocks * self._config.prompts_per_block
        start = cast(int, step_context.message or 0) + step_context.round * per_round
        size, made = self._config.blocks_per_batch, {}
        for first in sorted({block // size * size for block in inputs}):
            blocks = range(first, min(first + size, self._num_blocks))
            asked = tuple(self._block(start, block) for block in blocks)
            made |= {block: PromptSet(asked, block - first) for block in blocks if block in inputs}
        return Output(made)

    def _block(self, start: int, block: int) -> tuple[Asked, ...]:
        size = self._config.prompts_per_block
        return tuple(self._source.batch(Split.train, start + block * size, size))

    def offload(self, step_context: StepContext) -> None:
        """It holds no device memory."""

    def onload(self, step_context: StepContext) -> None:
        """See `offload`."""
