"""A policy that asks its high-level policy what to do every few chunk-steps, as a stage (see hierarchy.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import PolicyColumns, TwoLevelColumns
from rlinf_embodied.config import HierarchyConfig
from rlinf_embodied.embodied.hierarchy import guided
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, RolloutStage
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.learning.weights import WeightsMessage
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


@dataclass(frozen=True, slots=True)
class TwoLevelConfig:
    """What the stage needs to know."""

    low: PolicyStageConfig
    high: PolicyStageConfig
    hierarchy: HierarchyConfig


class TwoLevelStage:
    """Two policies of which the low-level one sees the choices of the other; each has its own weights and noise."""

    _level = RolloutStage

    def __init__(self, config: TwoLevelConfig) -> None:
        self._hierarchy = config.hierarchy
        self._low, self._high = self._level(config.low), self._level(config.high)
        self._by_name = {config.low.name: self._low, config.high.name: self._high}
        self._choices: dict[int, list[Tensor]] = {}  # by block, one for each chunk-step

    def setup(self, context: StageContext) -> None:
        """Loads both policies, or takes the ones that this worker's learners use."""
        for level in self._by_name.values():
            level.setup(context)

    def step(
        self, step_context: StepContext, observations: Mapping[int, Observation | None]
    ) -> dict[int, Tensor | None]:
        """Returns an action chunk [B, C, A] per block; None where the block has nothing to show."""
        if step_context.chunk_step == 0:
            self._choices |= {block: [] for block in observations}
        decides = step_context.chunk_step % self._hierarchy.every == 0
        decisions = self._high.step(step_context, observations) if decides else {}
        shown: dict[int, Observation | None] = dict.fromkeys(observations)
        for block, observation in observations.items():
            if observation is not None:
                choices, decision = self._choices[block], decisions.get(block)
                held = choices[-1] if decision is None else decision[:, 0].to(observation.proprio.device)
                choices.append(held)
                shown[block] = guided(self._hierarchy, observation, held)
        return self._low.step(step_context, shown)

    def close(self, step_context: StepContext, observations: Mapping[int, Observation | None]) -> Output:
        """Returns each block's columns; they are heavy and stay here if the learners do."""
        low, high = (level.close(step_context, observations).blocks for level in (self._low, self._high))
        found: dict[int, TwoLevelColumns | None] = {}
        for block in observations:
            ours, theirs = (cast("PolicyColumns | None", level[block]) for level in (low, high))
            choices = self._choices.pop(block)
            found[block] = None if theirs is None else TwoLevelColumns(ours, theirs, torch.stack(choices))
        return Output(found)

    def install_weights(self, step_context: StepContext, message: WeightsMessage) -> None:
        """Installs a new version of the policy that the message names."""
        self._by_name[message.policy].install_weights(step_context, message)

    def offload(self, step_context: StepContext) -> None:
        """Leaves the device's memory with both policies."""
        for level in self._by_name.values():
            level.offload(step_context)

    def onload(self, step_context: StepContext) -> None:
        """Brings both policies to the device's memory."""
        for level in self._by_name.values():
            level.onload(step_context)
