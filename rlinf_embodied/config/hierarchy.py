"""The section `hierarchy`: a high-level policy that chooses goals or instructions for the low-level one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlinf_embodied.config.algorithm import AlgorithmConfig, Sharding, Source
from rlinf_embodied.config.checks import require
from rlinf_embodied.config.env import EnvConfig
from rlinf_embodied.config.learning import PolicyConfig, WarmStartConfig


@dataclass(kw_only=True, slots=True)
class HierarchyConfig:
    """What the high-level policy chooses from, how often, and how it learns (docs/hierarchy.md).

    It chooses one of `instructions`, or any goal between `goal_low` and `goal_high`.
    """

    every: int = 0  # chunk-steps from one decision to the next; 0: there is no high-level policy
    instructions: list[str] = field(default_factory=list)  # one of these replaces the env's instruction
    goal_low: list[float] = field(default_factory=list)  # or any goal between these bounds ...
    goal_high: list[float] = field(default_factory=list)  # ... and these replaces the task's goal
    columns: list[int] = field(default_factory=list)  # of the proprioception that hold the goal
    way_columns: list[int] = field(default_factory=list)  # columns that hold the vector to the goal
    way_to_goal: bool = True  # that vector is goal minus position; false: position minus goal
    frozen: bool = True  # the low-level policy acts greedily and does not learn; false: it learns the task as well
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)  # an OnPolicyConfig; gae_lambda is per decision

    def __post_init__(self) -> None:
        require(self.every >= 0, "hierarchy.every", self.every, "it is a number of chunk-steps", "use 5, or 0 for none")
        if not self.on:
            return
        rule = "the high-level policy chooses either an instruction, or a goal between goal_low and goal_high"
        choices = f"with instructions={self.instructions} and goal_low={self.goal_low}"
        action = "give one, for example hierarchy.goal_low=[-1,-1] hierarchy.goal_high=[1,1] hierarchy.columns=[2,3]"
        require(bool(self.instructions) != bool(self.goal_low), "hierarchy", choices, rule, action)
        choice = len(self.instructions) != 1
        require(choice, "hierarchy.instructions", self.instructions, "one is no choice", "give two")
        for name in ("columns", "way_columns", "goal_high") if self.instructions else ():
            unused = getattr(self, name)
            require(not unused, f"hierarchy.{name}", unused, "an instruction has none", "leave it out")
        if self.goal_low:
            self._check_goals()

    def _check_goals(self) -> None:
        size, way, low, high = len(self.columns), self.way_columns, self.goal_low, self.goal_high
        rule = "it lists the columns of the proprioception that hold the goal, each once"
        fits = 0 < size == len(set(self.columns)) and min(self.columns) >= 0
        require(fits, "hierarchy.columns", self.columns, rule, "name the columns, for example [2,3]")
        rule = f"it is empty, or lists the {size} columns of the vector to the goal, in the order of hierarchy.columns"
        fits = not way or (len(way) == size == len(set(way)) and min(way) >= 0 and not set(way) & set(self.columns))
        require(fits, "hierarchy.way_columns", way, rule, "name other columns, or leave it out")
        fits = len(low) == len(high) == size and all(-math.inf < a < b < math.inf for a, b in zip(low, high))  # noqa: B905
        rule = f"it has {size} numbers, one per column, each below that of hierarchy.goal_high={high}"
        require(fits, "hierarchy.goal_low", low, rule, "exchange the two, or leave such a column out")

    @property
    def on(self) -> bool:
        return self.every > 0

    @property
    def size(self) -> int:
        """Length of a choice: one number per instruction, or per column."""
        return len(self.instructions) or len(self.columns)


def require_hierarchy(
    hierarchy: HierarchyConfig, env: EnvConfig, algorithm: AlgorithmConfig, start: WarmStartConfig
) -> None:
    """Checks that a high-level policy decides more than once, and that both levels can be trained or act."""
    if not hierarchy.on:
        return
    rule = "goals are columns of the state vectors of one env step"
    require(env.history == 1, "env.history", env.history, rule, "leave it out")
    steps = env.chunks_per_rollout
    rule = f"a rollout has env.chunks_per_rollout={steps} chunk-steps, in which there would be no second decision"
    require(hierarchy.every < steps, "hierarchy.every", hierarchy.every, rule, f"use {max(1, steps // 2)}")
    rule = "only an algorithm with a critic can tell the decisions within an episode apart"
    high = hierarchy.algorithm
    for path, level in (("", algorithm), ("hierarchy.", high)):
        fits, action = level.has_critic and level.learns_from is Source.rollouts, "use that of algorithm=ppo"
        require(fits, f"{path}algorithm._target_", level._target_, rule, action)
        coef = getattr(level, "bc_coef", 0.0)
        require(not coef, f"{path}algorithm.bc_coef", coef, "demonstrations are of one policy", "use 0")
    sharding = getattr(high, "sharding", Sharding.none)
    rule = "the high-level policy cannot be sharded"
    require(sharding is Sharding.none, "hierarchy.algorithm.sharding", sharding.value, rule, "leave it out")
    rule = "a frozen low-level policy with random weights never follows its goal"
    action = "give warm_start.checkpoint=<dir> warm_start.from_scratch=false, or hierarchy.frozen=false to train both"
    require(not (hierarchy.frozen and start.from_scratch), "hierarchy.frozen", hierarchy.frozen, rule, action)
