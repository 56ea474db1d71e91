"""Log-probs of finished completions as a stage: under the weights that sampled them, or under those of the start.

Proximal log-probs come from the training code, in training's batches: they are what a ratio is formed with where an
iteration makes more than one optimizer step.  With one step the actor's own forward pass gives them for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rlinf_embodied.config import Precision
from rlinf_embodied.learning.precision import computing
from rlinf_embodied.reasoning.batch import Completions, LogProbs
from rlinf_embodied.reasoning.dynamic_batching import Sequences, all_log_probs
from rlinf_embodied.reasoning.generation_stage import LanguageStage, LanguageStageConfig
from rlinf_embodied.runtime.host import Output, StepContext


@dataclass(frozen=True, slots=True)
class LogProbStageConfig:
    """What the stage needs to know."""

    model: LanguageStageConfig
    temperature: float
    tokens_per_microbatch: int
    precision: Precision = Precision.float32  # of the actor's passes
    proximal: bool = False  # under the weights that the update starts from


class LogProbStage(LanguageStage):
    """Reads completions once, without gradients."""

    _user = "log-probs"

    def __init__(self, config: LogProbStageConfig) -> None:
        super().__init__(config.model)
        self._config = config

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the LogProbs of each block."""
        config, made = self._config, {}
        for block, (completions,) in cast("Mapping[int, list[Completions]]", inputs).items():
            if config.proximal and step_context.runs_ahead:  # these weights are older: the actor computes them
                made[block] = LogProbs(None, self._shared.version)
                continue
            sequences = Sequences.of(completions.groups)
            with computing(config.precision, self._device):
                found = all_log_probs(self._shared.policy, sequences, config.temperature, config.tokens_per_microbatch)
            made[block] = LogProbs(found.log_probs, self._shared.version)
        return Output(made)
