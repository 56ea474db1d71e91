"""Problems with their prompts as tokens: which ones an iteration trains on, and which are too long for the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from rlinf_embodied.config import DataConfig, Engine, MathConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PROMPT_TEMPLATES
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError, DataError
from rlinf_embodied.interfaces.language import LanguagePolicy, PromptCodec
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.batch import Prompt, PromptSet
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

Asked = tuple[Problem, Prompt]
_FURTHER, _MOST_TRIES = 1 << 32, 100  # positions to the problem that replaces one that is too long
_LOOKED_AT = 2000  # of the problems of a stream without end
_NO_LIMIT = 1 << 40  # tokens


class Prompts:
    """A split's stream of problems, without those whose prompts are too long.

    In a stream without end another problem of the split takes the place of such a one, always the same; a split with an
    end becomes shorter.
    """

    def __init__(self, split: Split, data: DataConfig, seed: int, codec: PromptCodec, most: int, reason: str) -> None:
        """Opens the stream; prompts of more than `most` tokens are left out, for the `reason`."""
        self._split, self._codec, self._most, self._reason = split, codec, most, reason
        self._source, self._template = problem_source(data, seed), PROMPT_TEMPLATES[data.prompt_template]
        self._fitting: list[Asked] | None = None

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
        engine = generation.engine if trained else config.eval.engine
        limits = [
            (codec.context_length, "the context of the model holds {} tokens"),
            (config.algorithm.tokens_per_microbatch if trained else None, "algorithm.tokens_per_microbatch is {}"),
            (generation.vllm.max_model_len if engine is Engine.vllm else None, "generation.vllm.max_model_len is {}"),
        ]
        tokens, reason = min((most or _NO_LIMIT, reason.format(most)) for most, reason in limits)
        reason += f", and completions have up to generation.max_new_tokens={generation.max_new_tokens}"
        seed = config.run.seed if trained else config.data.seed
        return cls(split, config.data, seed, codec, tokens - generation.max_new_tokens, reason)

    def size(self) -> int | None:
        """Returns how many prompts a held-out split has; None: there is always a next one."""
        whole = self._source.size(self._split)
        if self._split is Split.train or whole is None:
            return None
        if self._fitting is None:
            every = map(self._asked, self._source.batch(self._split, 0, whole)) if whole else ()
            self._fitting = [asked for asked in every if self._fits(asked)]
        return len(self._fitting)

    def batch(self, start: int, count: int) -> list[Asked]:
        """Returns the problems at positions start .. start + count - 1 of the stream, with their prompts.

        Raises:
            DataError: hardly a prompt fits.
        """
        if self.size() is not None:
            return (self._fitting or [])[start : start + count]
        found = [self._asked(problem) for problem in self._source.batch(self._split, start, count)]
        return [asked if self._fits(asked) else self._further(start + number) for number, asked in enumerate(found)]

    def left_out(self, most: int | None = None) -> list[str]:
        """Returns a line about the prompts that are left out, of the first 2,000 or `most`; none if all fit.

        Raises:
            ConfigError: none fits.
        """
        size = self._source.size(self._split)
        number = min(n for n in (most, _LOOKED_AT if size is None else size) if n is not None)
        lengths = [len(self._asked(problem)[1].tokens) for problem in self._source.batch(self._split, 0, number or 1)]
        if min(lengths) > self._most:
            raise ConfigError(
                f"{self._reason}, but the shortest of {number} prompts for the split {self._split.value!r} has "
                f"{min(lengths)} tokens, and none is cut: use at least {min(lengths) - self._most} more tokens there, "
                "fewer new tokens, or shorter problems"
            )
        too_long = sum(length > self._most for length in lengths)
        text = f"prompts  {too_long} of {number} ({self._split.value}) have more than {self._most} tokens: left out"
        return [f"{text} ({self._reason})"] if too_long else []

    def _asked(self, problem: Problem) -> Asked:
        return problem, Prompt(problem.id, tuple(self._codec.encode(self._template.prompt(problem))))

    def _fits(self, asked: Asked) -> bool:
        return len(asked[1].tokens) <= self._most

    def _further(self, position: int) -> Asked:
        for number in range(1, _MOST_TRIES + 1):
            (problem,) = self._source.batch(self._split, position + number * _FURTHER, 1)
            if self._fits(asked := self._asked(problem)):
                return asked
        raise DataError(
            f"{self._reason}, and {_MOST_TRIES} problems in a row have prompts of more than {self._most} tokens: use a "
            "larger value, fewer new tokens, or shorter problems"
        )


class PromptStage:
    """Takes problems from the training stream: block b of round r has those at start + (r B + b) K ... of it.

    `start` is the step_context's message: how many problems the run has used so far.
    """

    def __init__(self, made: StageConfig) -> None:
        self._made, self._config = made, made.config

    def setup(self, context: StageContext) -> None:
        """Opens the stream."""
        self._num_blocks = context.num_blocks
        self._prompts = Prompts.of(self._config, self._made.folder, Split.train)

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
        return tuple(self._prompts.batch(start + block * size, size))

    def offload(self, step_context: StepContext) -> None:
        """It holds no device memory."""

    def onload(self, step_context: StepContext) -> None:
        """It holds none."""
