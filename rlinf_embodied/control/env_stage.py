"""The simulator of the embodied workflow, which tells transitions in place of the columns of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_embodied.control.transitions import (
    ACTION,
    ALL,
    EXPERT_ACTION,
    NEXT_STATE,
    REWARD,
    STATE,
    TERMINATED,
    Columns,
)
from rlinf_embodied.embodied.env_stage import Blocks, EnvStage, EnvStageConfig, _Shard
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.runtime.host import StepContext


@dataclass(frozen=True, slots=True)
class TransitionEnvConfig(EnvStageConfig):
    """An EnvStageConfig with what is told of each step, and how long the scripted expert acts in the policy's place."""

    columns: tuple[str, ...] = ALL
    expert_iterations: int = 0


class TransitionEnvStage(EnvStage):
    """Steps rows as `EnvStage` does, one action at a time, and hands on what was seen, done and seen then."""

    def __init__(self, config: TransitionEnvConfig) -> None:
        super().__init__(config)
        self._told, self._expert_iterations = config.columns, config.expert_iterations
        self._steps: dict[Blocks, list[Columns]] = {}  # of the rollout under way, every column [N, ...]

    def _begin(self, shard: _Shard) -> None:
        super()._begin(shard)
        self._steps[shard.blocks] = []

    def step(self, step_context: StepContext, actions: Mapping[int, Tensor | None]) -> dict[int, Observation | None]:
        """See EnvStage; in the first iterations it is the expert that acts.

        Raises:
            SimulatorError: the task has no expert, and one is asked for.
        """
        if step_context.iteration < self._expert_iterations:
            env = self._shards[tuple(actions)].env
            chosen = env.expert_actions().clamp(-1.0, 1.0)[:, None].split(self._size)
            actions = dict(zip(actions, chosen, strict=True))
        return super().step(step_context, actions)

    def _advance(
        self, shard: _Shard, actions: Tensor | Callable[[int], Tensor], seeds: Sequence[int] | None
    ) -> dict[int, Observation | None]:
        assert shard.observation is not None
        assert isinstance(actions, Tensor)
        before = shard.observation.proprio
        told = {EXPERT_ACTION: shard.env.expert_actions().clamp(-1.0, 1.0)} if EXPERT_ACTION in self._told else {}
        shown = super()._advance(shard, actions, seeds)
        result = shard.results[-1]
        after = shard.observation.proprio.clone()
        if result.final_observation is not None:
            after[list(result.final_rows)] = result.final_observation.proprio
        columns = told | {
            STATE: before,
            ACTION: actions[:, 0],
            REWARD: result.rewards[:, 0],
            NEXT_STATE: after,
            TERMINATED: result.terminated[:, 0].to(torch.float32),
        }
        self._steps[shard.blocks].append({name: columns[name] for name in self._told})
        return shown

    def _columns(self, shard: _Shard, index: int, step_context: StepContext) -> Columns:
        """Returns a block's transitions, step by step."""
        rows, steps = slice(index * self._size, (index + 1) * self._size), self._steps[shard.blocks]
        return {name: torch.cat([step[name][rows] for step in steps]) for name in self._told}

    def _group_success(self, columns: Mapping[int, object]) -> dict[int, tuple[bool, ...]]:
        return {}
