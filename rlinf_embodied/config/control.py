"""What experiments/train_control.py reads: learning from transitions that are kept or recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from rlinf_embodied.config.checks import require
from rlinf_embodied.config.env import EnvConfig
from rlinf_embodied.config.learning import PolicyConfig, Reduction, StartConfig
from rlinf_embodied.config.machine import ClusterConfig, PlanConfig, RecoveryConfig
from rlinf_embodied.config.run import CheckpointConfig, EvalConfig, RunConfig, TrackioConfig, WandbConfig


class ControlName(StrEnum):
    """What learns from transitions."""

    sac = "sac"  # soft actor-critic; with demonstrations and an ensemble of critics RLPD


_COUNTS = ("batch_size", "capacity", "policy_period", "num_critics", "target_critics", "critic_hidden_size")
_RATES = ("lr", "value_lr", "initial_entropy_coef", "updates_per_step")


@dataclass(kw_only=True, slots=True)
class ControlAlgorithmConfig:
    """One learner's numbers; the defaults are those of SAC (arXiv 1812.05905, table 1)."""

    name: ControlName = ControlName.sac
    gamma: float = 0.99  # per env step
    lr: float = 3e-4  # of the policy and of the entropy coefficient
    value_lr: float = 3e-4  # of the critics
    batch_size: int = 256  # transitions per update, an equal part of every block
    reduction: Reduction = Reduction.auto
    # the replay buffer
    capacity: int = 1_000_000  # transitions over all blocks; the oldest ones make room
    warmup_steps: int = 1_000  # env steps of uniform actions before the first update, rounded up to whole iterations
    updates_per_step: float = 1.0  # updates of the critics per env step
    # the critics
    num_critics: int = 2
    target_critics: int = 2  # the target is the least of so many, drawn anew for each update where there are more
    critic_hidden_size: int = 256
    critic_layers: int = 2
    layer_norm: bool = False  # behind every hidden layer of the critics
    tau: float = 0.005  # how far targets move towards the critics per update
    # the policy
    policy_period: int = 1  # updates of the critics per update of the policy
    pessimistic_policy: bool = True  # the policy climbs the least of all critics; false: their mean
    entropy_coef: float | None = None  # null: learned, so that the entropy is target_entropy
    initial_entropy_coef: float = 1.0  # of one that is learned
    target_entropy: float | None = None  # null: minus the number of action dimensions
    entropy_in_target: bool = True  # whether the critics' target holds the entropy of the next action

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            require(value >= 1, f"algorithm.{name}", value, "it must be at least 1", "use a positive number")
        for name in _RATES:
            value = getattr(self, name)
            require(0 < value < math.inf, f"algorithm.{name}", value, "it must be positive", "use a positive number")
        number = self.critic_layers
        require(number >= 1, "algorithm.critic_layers", number, "critics have hidden layers", "use 2")
        number = self.warmup_steps
        require(number >= 0, "algorithm.warmup_steps", number, "it must not be negative", "use 0 for none")
        require(0 <= self.gamma < 1, "algorithm.gamma", self.gamma, "it lies in [0, 1)", "use 0.99")
        require(0 < self.tau <= 1, "algorithm.tau", self.tau, "it lies in (0, 1]", "use 0.005")
        given = self.entropy_coef
        require(given is None or given >= 0, "algorithm.entropy_coef", given, "it must not be negative", "use null")
        require(
            self.target_critics <= self.num_critics,
            "algorithm.target_critics",
            self.target_critics,
            f"the target is the least of some of algorithm.num_critics={self.num_critics}",
            f"use at most {self.num_critics}",
        )


@dataclass(kw_only=True, slots=True)
class ControlStartConfig(StartConfig):
    """What the policy starts from."""

    checkpoint: str | None = None  # a folder of the same policy; null: random weights


@dataclass(kw_only=True, slots=True)
class ControlConfig:
    """Everything that experiments/train_control.py reads."""

    env: EnvConfig
    policy: PolicyConfig
    algorithm: ControlAlgorithmConfig
    plan: PlanConfig
    cluster: ClusterConfig
    run: RunConfig = field(default_factory=RunConfig)
    warm_start: ControlStartConfig = field(default_factory=ControlStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    resume: str = "auto"  # auto: go on where run.dir stopped (see FREE_ON_RESUME); never: refuse a used folder; <path>

    def __post_init__(self) -> None:
        env, algorithm = self.env, self.algorithm
        rule = "a transition is one env step"
        require(env.chunk == 1, "env.chunk", env.chunk, rule, "use env.chunk=1")
        rule = "every row steps in every chunk-step, so that updates per env step mean something"
        require(env.auto_reset, "env.auto_reset", env.auto_reset, rule, "set env.auto_reset=true")
        rule = "transitions hold no images: what learns from them acts on a state"
        require(not env.cameras, "env.cameras", list(env.cameras), rule, "use env.cameras=[]")
        require(
            env.carry_over or env.chunks_per_rollout >= env.horizon,
            "env.chunks_per_rollout",
            env.chunks_per_rollout,
            f"an episode may take {env.horizon} steps, and none would be seen to its end",
            f"set env.chunks_per_rollout={env.horizon} or env.carry_over=true",
        )
        for name in ("batch_size", "capacity"):
            value = getattr(algorithm, name)
            require(
                value % env.num_blocks == 0,
                f"algorithm.{name}",
                value,
                f"each of the env.num_envs / env.block_size = {env.num_blocks} blocks holds an equal part",
                f"use {max(1, value // env.num_blocks) * env.num_blocks}",
            )
        require(
            algorithm.capacity >= env.num_envs * env.chunks_per_rollout,
            "algorithm.capacity",
            algorithm.capacity,
            f"an iteration gathers env.num_envs x env.chunks_per_rollout = {env.num_envs * env.chunks_per_rollout}",
            "use at least that",
        )
        rule = "the log-probs of its distribution are those that the objective is about"
        require(self.policy.temperature == 1, "policy.temperature", self.policy.temperature, rule, "use 1.0")
        require(
            algorithm.reduction is not Reduction.fast or not self.run.exact.holds,
            "algorithm.reduction",
            algorithm.reduction.value,
            "run.exact=true needs sums in a fixed order",
            "set run.exact=false or algorithm.reduction=auto",
        )

    @property
    def steps_per_iteration(self) -> int:
        """Env steps of an iteration over all rows."""
        return self.env.num_envs * self.env.chunks_per_rollout

    @property
    def warmup_iterations(self) -> int:
        """Iterations of uniform actions."""
        return -(-self.algorithm.warmup_steps // self.steps_per_iteration)

    @property
    def updates_per_iteration(self) -> int:
        """Updates of the critics in an iteration that learns."""
        return max(1, round(self.algorithm.updates_per_step * self.steps_per_iteration))
