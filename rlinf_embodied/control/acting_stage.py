"""The policy of the embodied workflow, acting only: transitions come from the env, so that nothing else is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, RolloutStage
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.randomness import uniform
from rlinf_embodied.runtime.host import Output, StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingConfig(PolicyStageConfig):
    """A PolicyStageConfig with how it acts."""

    uniform_until: int  # iterations before this one have uniform actions
    greedy: bool  # later on it does what it holds for best, not what it samples


class ActingStage(RolloutStage):
    """Samples actions, or in the first iterations uniform ones, with noise keyed as that of `RolloutStage`."""

    def __init__(self, config: ActingConfig) -> None:
        super().__init__(config)
        self._acting = config

    def _act(self, step_context: StepContext, block: int, observation: Observation) -> Tensor:
        policy, size = self._policy, self._config.block_size
        ids = np.arange(block * size, (block + 1) * size)
        when = (step_context.iteration, step_context.round, step_context.chunk_step)
        if step_context.iteration < self._acting.uniform_until:
            shape = (policy.spec.chunk, policy.spec.action_dim)
            drawn = uniform(self._config.seed, "uniform action", ids, *when, shape=shape)
            return torch.from_numpy(drawn * 2 - 1).to(self._device)
        drawn = None if self._acting.greedy else policy.spec.noise.draw(self._config.seed, "action", ids, *when)
        noise = None if drawn is None else drawn.to(self._device)
        return policy.act(policy.encode(observation.to(self._device)), noise, self._config.policy.temperature).actions

    def close(self, step_context: StepContext, observations: Mapping[int, Observation | None]) -> Output:
        return Output(dict.fromkeys(observations))
