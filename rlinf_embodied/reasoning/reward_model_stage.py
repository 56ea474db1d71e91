"""The stage of a frozen reward model, whose scores go to the stage `reward`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.interfaces.language import RewardModel
from rlinf_embodied.learning.weights import SharedPolicy, WeightsUser
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.batch import Completions, dynamic_batches
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.telemetry.progress import report_progress


class RewardModelStage(WeightsUser[RewardModel]):
    """Scores the last row of each sample: a prompt with its completion, or an episode with the tool's answers."""

    _user = "reward model"

    def __init__(self, stage_config: StageConfig) -> None:
        self._config, self._folder = stage_config.config, Path(stage_config.folder)

    def setup(self, context: StageContext) -> None:
        model_class = cast(type[RewardModel], load_target(self._config.reward.model_target))
        self._shared = SharedPolicy(model_class.load(self._folder), device=context.device)
        self._shared.enter(self._user)
        self._device = context.device

    @torch.no_grad()
    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the scores of each block, float32 [K x G]."""
        return Output({block: self._scores(cast(Completions, payload)) for block, (payload,) in inputs.items()})

    def _scores(self, completions: Completions) -> Tensor:
        model, budget = self._shared.policy, self._config.algorithm.tokens_per_microbatch
        rows = completions.rows.select(completions.last_rows())
        scores, batches = torch.zeros(len(rows)), [[row] for row in range(len(rows))]
        if model.pad_id is not None:  # otherwise transformers cannot locate the end of shorter rows
            batches = dynamic_batches(rows.lengths.tolist(), budget)
        for part in batches:
            scores[part] = model.scores(rows.select(part).to(self._device)).cpu()
            report_progress()
        return scores
