"""What experiments/train_control.py reads: learning from transitions that are kept or recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from rlinf_embodied.config.checks import require
from rlinf_embodied.config.env import EnvConfig
from rlinf_embodied.config.learning import PolicyConfig, Reduction, StartConfig, require_exact
from rlinf_embodied.config.machine import ClusterConfig, PlanConfig, RecoveryConfig, require_no_cores
from rlinf_embodied.config.run import CheckpointConfig, EvalConfig, RunConfig, TrackioConfig, WandbConfig


class ControlName(StrEnum):
    """What learns from transitions."""

    sac = "sac"  # soft actor-critic; with demonstrations and an ensemble of critics RLPD
    iql = "iql"  # implicit Q-learning, from recorded transitions alone
    bc = "bc"  # behaviour cloning of recorded actions
    dagger = "dagger"  # behaviour cloning of what the scripted expert would do where the policy leads

    @property
    def acts(self) -> bool:
        """Whether it gathers transitions; otherwise it learns from `data` alone."""
        return self in (ControlName.sac, ControlName.dagger)


_COUNTS = (
    "batch_size",
    "capacity",
    "policy_period",
    "num_critics",
    "target_critics",
    "critic_hidden_size",
    "updates_per_iteration",
)
_RATES = ("lr", "value_lr", "initial_entropy_coef", "updates_per_step", "advantage_limit")


@dataclass(kw_only=True, slots=True)
class ControlAlgorithmConfig:
    """One learner's numbers; the defaults are those of SAC (arXiv 1812.05905, table 1)."""

    name: ControlName = ControlName.sac
    gamma: float = 0.99  # per env step
    lr: float = 3e-4  # of the policy and of the entropy coefficient
    value_lr: float = 3e-4  # of the critics
    batch_size: int = 256  # transitions per update, an equal part of every block
    reduction: Reduction = Reduction.auto
    compile: bool = False  # passes of the updates, by torch.compile (docs/gymnasium.md)
    # the replay buffer
    capacity: int = 1_000_000  # transitions over all blocks; the oldest ones make room
    expert_steps: int = 0  # env steps of the scripted expert before all else; where SAC learns they are demonstrations
    demonstration_share: float = 0.5  # of a batch, as long as there are demonstrations
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
    policy_period: int = 1  # updates of the critics per update of the policy, counted over iterations
    pessimistic_policy: bool = True  # the policy climbs the least of all critics; false: their mean
    entropy_coef: float | None = None  # null: learned
    initial_entropy_coef: float = 1.0  # of one that is learned
    entropy_per_dimension: float = -1.0  # of an action: what a learned coefficient keeps the entropy at
    entropy_in_target: bool = True  # whether the critics' target holds the entropy of the next action
    # without env steps, from `data` alone
    updates_per_iteration: int = 500
    # IQL (arXiv 2110.06169)
    expectile: float = 0.7  # of Q over the recorded actions, which V is
    advantage_scale: float = 3.0  # of exp(scale (Q - V)), the weight of a recorded action ...
    advantage_limit: float = 100.0  # ... and its largest value

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            require(value >= 1, f"algorithm.{name}", value, "it must be at least 1", "use a positive number")
        for name in _RATES:
            value = getattr(self, name)
            require(0 < value < math.inf, f"algorithm.{name}", value, "it must be positive", "use a positive number")
        number = self.critic_layers
        require(number >= 1, "algorithm.critic_layers", number, "critics have hidden layers", "use 2")
        for name in ("warmup_steps", "expert_steps", "advantage_scale"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"algorithm.{name}", value, "it must not be negative", "use 0 for none")
        share = self.demonstration_share
        require(0 <= share <= 1, "algorithm.demonstration_share", share, "it is a share of a batch", "use 0.5")
        require(0 < self.expectile < 1, "algorithm.expectile", self.expectile, "it lies in (0, 1)", "use 0.7")
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
    data: str | None = None  # recorded transitions: checkpoints of runs that acted, joined by commas
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
        require_no_cores(self.cluster)
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
        self._require_data()
        rule = "the log-probs of its distribution are those that the objective is about"
        require(self.policy.temperature == 1, "policy.temperature", self.policy.temperature, rule, "use 1.0")
        require_exact(self.run.exact, "algorithm", algorithm.reduction, algorithm.compile)

    def _require_data(self) -> None:
        """Checks that there is something to learn from, and nothing that would not be used."""
        name, steps = self.algorithm.name, self.algorithm.expert_steps
        rule, action = (
            f"algorithm.name={name} learns from recorded transitions",
            "give data=<run.dir>/checkpoints/latest",
        )
        require(name.acts or bool(self.files), "data", self.data, rule, action)
        rule = f"algorithm.name={name} takes no env step"
        require(name.acts or not steps, "algorithm.expert_steps", steps, rule, "use 0")
        rule, action = f"data={self.data} holds the demonstrations", "use 0, or leave data out"
        require(not (steps and self.files), "algorithm.expert_steps", steps, rule, action)
        rule = "DAgger learns from what it gathers"
        require(name is not ControlName.dagger or not self.files, "data", self.data, rule, "leave it out")
        rule = "DAgger begins with what the expert does"
        begins = name is not ControlName.dagger or steps > 0
        require(begins, "algorithm.expert_steps", steps, rule, "use 2000")
        rows, share = self.rows_per_block, self.algorithm.demonstration_share
        mixed = name is ControlName.sac and (steps > 0 or bool(self.files)) and 0 < share < 1
        rule = f"of the {rows} transitions of a block in a batch {self.demonstration_rows} would be demonstrations"
        action = "use a larger algorithm.batch_size or env.block_size, or a share of 0 or 1"
        holds = not mixed or 0 < self.demonstration_rows < rows
        require(holds, "algorithm.demonstration_share", share, rule, action)

    @property
    def files(self) -> list[str]:
        """The folders that `data` names."""
        return [part.strip() for part in (self.data or "").split(",") if part.strip()]

    @property
    def rows_per_block(self) -> int:
        """Transitions of a block in a batch."""
        return self.algorithm.batch_size // self.env.num_blocks

    @property
    def demonstration_rows(self) -> int:
        """How many of them are demonstrations, as long as there are both."""
        return round(self.rows_per_block * self.algorithm.demonstration_share)

    @property
    def steps_per_iteration(self) -> int:
        """Env steps of an iteration over all rows."""
        return self.env.num_envs * self.env.chunks_per_rollout

    @property
    def expert_iterations(self) -> int:
        """Iterations in which the expert acts."""
        return -(-self.algorithm.expert_steps // self.steps_per_iteration)

    @property
    def first_update(self) -> int:
        """The first iteration that learns: the expert's, and those of uniform actions, come before it."""
        if not self.algorithm.name.acts:
            return 0
        return self.expert_iterations + -(-self.algorithm.warmup_steps // self.steps_per_iteration)

    @property
    def updates_per_iteration(self) -> int:
        """Updates of the critics, or of what is cloned, in an iteration that learns."""
        algorithm = self.algorithm
        if not algorithm.name.acts:
            return algorithm.updates_per_iteration
        return max(1, round(algorithm.updates_per_step * self.steps_per_iteration))
