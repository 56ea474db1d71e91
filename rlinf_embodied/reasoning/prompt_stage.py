"""Problems as a stage: which ones an iteration trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.reasoning.batch import PromptSet
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


@dataclass(frozen=True, slots=True)
class PromptStageConfig:
    """What the stage needs to know."""

    data: DataConfig
    seed: int
    prompts_per_block: int
    blocks_per_batch: int


class PromptStage:
    """Takes problems from the training stream: block b of round r has those at start + (r B + b) K ... of it.

    `start` is the step_context's message: how many problems the run has used so far.
    """

    def __init__(self, config: PromptStageConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Opens the stream."""
        self._num_blocks = context.num_blocks
        self._source = problem_source(self._config.data, self._config.seed)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the PromptSet of each block."""
        start = (
            cast(int, step_context.message or 0)
            + step_context.round * self._num_blocks * self._config.prompts_per_block
        )
        size, made = self._config.blocks_per_batch, {}
        for first in sorted({block // size * size for block in inputs}):
            blocks = range(first, min(first + size, self._num_blocks))
            problems = tuple(self._block(start, block) for block in blocks)
            made |= {block: PromptSet(problems, block - first) for block in blocks if block in inputs}
        return Output(made)

    def _block(self, start: int, block: int) -> tuple[Problem, ...]:
        size = self._config.prompts_per_block
        return tuple(self._source.batch(Split.train, start + block * size, size))

    def offload(self, step_context: StepContext) -> None:
        """Leaves the device's memory: it holds none."""

    def onload(self, step_context: StepContext) -> None:
        """Comes back."""
