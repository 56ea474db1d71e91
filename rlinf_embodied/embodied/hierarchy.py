"""Two levels of policies: what the lower one sees of a choice of the higher, and which columns each is trained on.

    env step     . . . . . . . . . . . .         C in a chunk
    chunk-step   |---|---|---|---|---|---|       the low-level policy acts
    decision     |-----------|-----------|       the high-level policy chooses, every k chunk-steps

A decision is one step of a semi-Markov decision process (Sutton, Precup, Singh 1999): its reward is the discounted sum
of those of its env steps, up to the end of the episode if it comes in between; the value after n steps counts gamma^n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_embodied.algorithms.advantages import chunk_steps
from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, TwoLevelColumns
from rlinf_embodied.config import HierarchyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, RolloutStage
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.learning.weights import WeightsMessage
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

HIGH_POLICY = "high_policy"  # names its weights in a worker, and its noise
HIGH_FOLDER = "high"  # of a checkpoint: the high-level policy's files; the files next to it are the low-level policy's


def choice_spec(env: EnvSpec, hierarchy: HierarchyConfig) -> EnvSpec:
    """Returns what a high-level policy acts in: it sees what the env shows, and makes one choice at a time.

    Raises:
        ConfigError: the columns of a goal are none of the env's.
    """
    for name, columns in (("columns", hierarchy.columns), ("way_columns", hierarchy.way_columns)):
        rule = f"the proprioception of {env.task} has the columns 0..{env.proprio_dim - 1}"
        require(max(columns, default=-1) < env.proprio_dim, f"hierarchy.{name}", columns, rule, "name others")
    several = bool(hierarchy.instructions)
    return replace(env, chunk=1, execute_steps=0, action_dim=hierarchy.size, categorical=several)


def guided(hierarchy: HierarchyConfig, observation: Observation, choice: Tensor) -> Observation:
    """Returns what the low-level policy sees: a choice in place of the task's goal or instruction.

    The choice is float32 [B, D] as the high-level policy gave it, in [-1, 1]; of instructions the largest entry counts.
    """
    if hierarchy.instructions:
        chosen = choice.argmax(1).tolist()
        return replace(observation, instruction=tuple(hierarchy.instructions[number] for number in chosen))
    low, high = choice.new_tensor(hierarchy.goal_low), choice.new_tensor(hierarchy.goal_high)
    goal = low + (choice.clamp(-1.0, 1.0) + 1.0) / 2.0 * (high - low)  # [B, number of columns]
    proprio, columns = observation.proprio.clone(), hierarchy.columns
    if hierarchy.way_columns:
        moved = goal - proprio[:, columns]
        proprio[:, hierarchy.way_columns] += moved if hierarchy.way_to_goal else -moved
    proprio[:, columns] = goal
    return observation.with_proprio(proprio)


@dataclass(frozen=True, slots=True)
class TwoLevelConfig:
    """What the stage needs to know."""

    low: PolicyStageConfig
    high: PolicyStageConfig
    hierarchy: HierarchyConfig


class TwoLevelStage:
    """Two policies of which the low-level one sees the choices of the other; each has its own weights and noise.

    Methods are those of `RolloutStage`, for both.
    """

    def __init__(self, config: TwoLevelConfig) -> None:
        self._hierarchy = config.hierarchy
        self._low, self._high = RolloutStage(config.low), RolloutStage(config.high)
        self._by_name = {config.low.name: self._low, config.high.name: self._high}
        self._choices: dict[int, list[Tensor]] = {}  # by block, one for each chunk-step

    def setup(self, context: StageContext) -> None:
        for level in self._by_name.values():
            level.setup(context)

    def step(
        self, step_context: StepContext, observations: Mapping[int, Observation | None]
    ) -> dict[int, Tensor | None]:
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
        low, high = (level.close(step_context, observations).blocks for level in (self._low, self._high))
        found: dict[int, TwoLevelColumns | None] = {}
        for block in observations:
            choices, theirs = self._choices.pop(block), cast("PolicyColumns | None", high[block])
            ours = cast("PolicyColumns | None", low[block])
            found[block] = None if theirs is None else TwoLevelColumns(ours, theirs, torch.stack(choices))
        return Output(found)

    def install_weights(self, step_context: StepContext, message: WeightsMessage) -> None:
        """Installs a new version of the policy that the message names."""
        self._by_name[message.policy].install_weights(step_context, message)

    def offload(self, step_context: StepContext) -> None:
        for level in self._by_name.values():
            level.offload(step_context)

    def onload(self, step_context: StepContext) -> None:
        for level in self._by_name.values():
            level.onload(step_context)


def low_level_columns(
    hierarchy: HierarchyConfig, policy: TwoLevelColumns, env: EnvColumns
) -> tuple[PolicyColumns, EnvColumns]:
    """Returns a low-level policy's columns, with the choices in the env's last and final observations."""
    assert policy.low is not None, "a frozen policy has no learner"
    last, final = guided(hierarchy, env.last, policy.choices[-1]), env.final
    if final is not None:
        final = guided(hierarchy, final, policy.choices[env.final_index[:, 0], env.final_index[:, 1]])
    return policy.low, replace(env, last=last, final=final)


def decision_columns(
    every: int, gamma: float, policy: TwoLevelColumns, env: EnvColumns
) -> tuple[PolicyColumns, EnvColumns]:
    """Returns a high-level policy's columns, where a decision and the chunk-steps until the next one are one step.

    The env's are [ceil(H / every), B, 1]; gamma is per env step.  Steps of the next episode, where one begins within a
    decision, are left out.
    """

    def joined(column: Tensor) -> Tensor:
        """Returns a column [H, B, C] as [decisions, B, every * C], with zeros behind the end of the rollout."""
        whole = functional.pad(column, (0, 0, 0, 0, 0, -len(column) % every))
        return whole.unflatten(0, (-1, every)).transpose(1, 2).flatten(2)

    ends = joined((env.terminated | env.truncated) & env.valid)
    valid = joined(env.valid) & ((ends.cumsum(-1) - ends.to(torch.int64)) == 0)
    steps = chunk_steps(joined(env.rewards), joined(env.terminated), joined(env.truncated), valid, gamma)
    first: dict[tuple[int, int], int] = {}  # of each decision and row, the first end of an episode: it is known
    for place, (step, row) in enumerate(env.final_index.tolist()):
        first.setdefault((step // every, row), place)
    return policy.high, replace(
        env,
        rewards=steps.rewards[..., None],
        terminated=steps.terminated[..., None],
        truncated=steps.truncated[..., None],
        valid=steps.valid[..., None],
        privileged=None if env.privileged is None else env.privileged[::every, :, :1],
        final_index=torch.tensor(list(first), dtype=torch.long, device=env.final_index.device).reshape(-1, 2),
        final=None if env.final is None else env.final.rows(list(first.values())),
        discounts=steps.discount[..., None],
        tasks=None if env.tasks is None else env.tasks[::every],
    )
