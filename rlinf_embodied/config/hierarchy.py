"""The section `hierarchy`: a high-level policy that tells the low-level one what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_embodied.config.algorithms import AlgorithmConfig, PPOConfig, Sharding
from rlinf_embodied.config.checks import require, within
from rlinf_embodied.config.env import EnvConfig
from rlinf_embodied.config.learning import Critic, PolicyConfig, WarmStartConfig


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


@dataclass(kw_only=True, slots=True)
class HighLevelPolicyConfig(PolicyConfig):
    """A PolicyConfig whose keys begin with hierarchy."""

    def __post_init__(self) -> None:
        with within("hierarchy"):
            PolicyConfig.__post_init__(self)


@dataclass(kw_only=True, slots=True)
class HighLevelAlgorithmConfig(PPOConfig):
    """A PPOConfig whose keys begin with hierarchy."""

    def __post_init__(self) -> None:
        with within("hierarchy"):
            PPOConfig.__post_init__(self)


def _high_level_policy() -> PolicyConfig:
    return HighLevelPolicyConfig(
        _target_="policies.actor_critic.ActorCritic",
        name="actor_critic",
        critic=Critic.observation,
        temperature=1.0,
    )


def _high_level_algorithm() -> PPOConfig:
    return HighLevelAlgorithmConfig(lr=3e-4, target_kl=None, critic_warmup_iterations=0, bootstrap_at_timeout=True)


@dataclass(kw_only=True, slots=True)
class HierarchyConfig:
    """What the high-level policy chooses from, how often, and how it learns (docs/hierarchy.md).

    It says one of `instructions`, or one of `goals`, or any goal between `goal_low` and `goal_high`.
    """

    every: int = 0  # chunk-steps from one decision to the next; 0: there is no high-level policy
    instructions: list[str] = field(default_factory=list)  # one of these takes the place of the env's
    goals: list[Any] = field(default_factory=list)  # or one of these goals the place of the task's
    goal_low: list[float] = field(default_factory=list)  # or any goal from these bounds ...
    goal_high: list[float] = field(default_factory=list)  # ... to these
    columns: list[int] = field(default_factory=list)  # of the proprioception: where the goal is
    way_columns: list[int] = field(default_factory=list)  # where the way to it is, which changes with it
    way_to_goal: bool = True  # the way is goal minus place; false: place minus goal
    frozen: bool = True  # the low-level policy stays as it is and acts greedily; false: it learns, too, by the task
    checkpoint: str | None = None  # a high-level policy to start from; None: random weights
    policy: PolicyConfig = field(default_factory=_high_level_policy)
    algorithm: PPOConfig = field(
        default_factory=_high_level_algorithm
    )  # PPO; gamma is per env step, gae_lambda per decision

    def __post_init__(self) -> None:
        require(self.every >= 0, "hierarchy.every", self.every, "it is a number of chunk-steps", "use 5, or 0 for none")
        if not self.on:
            return
        ways = {"instructions": self.instructions, "goals": self.goals, "goal_low": self.goal_low}
        given = [name for name, value in ways.items() if value]
        rule = "the high-level policy chooses from one of instructions, goals, and goal_low with goal_high"
        require(
            len(given) == 1,
            "hierarchy",
            f"with {', '.join(given) or 'none of them'}",
            rule,
            "give one, for example hierarchy.goal_low=[-1,-1] hierarchy.goal_high=[1,1] hierarchy.columns=[2,3]",
        )
        unused = self.goal_high and not self.goal_low
        rule, action = "it is the upper bound of a goal whose lower one is hierarchy.goal_low", "leave it out"
        require(not unused, "hierarchy.goal_high", self.goal_high, rule, action)
        self._check_goals()

    def _check_goals(self) -> None:
        size = len(self.columns)
        if self.instructions:
            few = len(self.instructions)
            require(few >= 2, "hierarchy.instructions", self.instructions, "one is no choice", "give two or more")
            for name in ("columns", "way_columns"):
                columns = getattr(self, name)
                require(not columns, f"hierarchy.{name}", columns, "an instruction has none", "leave it out")
            return
        rule = "it says where the low-level policy sees its goal, each column of the proprioception once"
        fits = 0 < size == len(set(self.columns)) and min(self.columns, default=-1) >= 0
        require(fits, "hierarchy.columns", self.columns, rule, "name the columns, for example [2,3]")
        way, rule = self.way_columns, f"it is empty, or has the {size} columns of the way in the order of the goal's"
        fits = not way or (len(way) == size == len(set(way)) and min(way) >= 0 and not set(way) & set(self.columns))
        require(fits, "hierarchy.way_columns", way, rule, "name other columns, or leave it out")
        if self.goals:
            require(len(self.goals) >= 2, "hierarchy.goals", self.goals, "one is no choice", "give two or more")
        for name in ("goals", "goal_low", "goal_high"):
            for point in self.goals if name == "goals" else [getattr(self, name)] if not self.goals else []:
                rule = f"a goal has {size} finite numbers, one for each of hierarchy.columns"
                holds = isinstance(point, list) and len(point) == size and all(map(_is_finite, point))
                require(holds, f"hierarchy.{name}", point, rule, f"give {size} numbers")
        self.goals = [[float(x) for x in point] for point in self.goals]
        ordered = all(a < b for a, b in zip(self.goal_low, self.goal_high, strict=False))
        rule = f"each number is below that of hierarchy.goal_high={self.goal_high}"
        require(ordered, "hierarchy.goal_low", self.goal_low, rule, "exchange the two, or leave such a column out")

    @property
    def on(self) -> bool:
        """Whether there is a high-level policy."""
        return self.every > 0

    @property
    def choices(self) -> Sequence[object]:
        """What it chooses from; empty where that is any goal between two bounds."""
        return self.instructions or self.goals

    @property
    def size(self) -> int:
        """Numbers of what it says: one per choice, or per column."""
        return len(self.choices) or len(self.columns)


def require_hierarchy(
    hierarchy: HierarchyConfig, env: EnvConfig, algorithm: AlgorithmConfig, start: WarmStartConfig
) -> None:
    """Checks a high-level policy against the rest of the configuration.

    Raises:
        ConfigError: it never decides twice, or one of the two levels cannot be trained or act as the section says.
    """
    if not hierarchy.on:
        return
    steps = env.chunks_per_rollout
    rule = f"a rollout has env.chunks_per_rollout={steps} chunk-steps, in which there would be no second decision"
    require(hierarchy.every < steps, "hierarchy.every", hierarchy.every, rule, f"use {max(1, steps // 2)}")
    rule = "only an algorithm with a critic can tell the decisions within an episode apart"
    require(isinstance(algorithm, PPOConfig), "algorithm._target_", algorithm._target_, rule, "use algorithm=ppo")
    sharding = hierarchy.algorithm.sharding
    rule = "the high-level policy is trained whole"
    require(sharding is Sharding.none, "hierarchy.algorithm.sharding", sharding.value, rule, "leave it out")
    rule = "a low-level policy that stays as it is, with random weights, never follows its goal"
    action = "give warm_start.checkpoint=<dir> warm_start.from_nothing=false, or hierarchy.frozen=false to train both"
    require(not (hierarchy.frozen and start.from_nothing), "hierarchy.frozen", hierarchy.frozen, rule, action)
