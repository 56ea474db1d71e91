"""The section `algorithm`: how the policy learns, one dataclass for each algorithm, chosen by algorithm._target_.

    AlgorithmConfig     what every algorithm has
      OnPolicyConfig    from rollouts of the newest weights         PPOConfig, GRPOConfig
      ReplayConfig      from transitions that are kept or recorded  SACConfig (with demonstrations RLPD), IQLConfig,
                                                                    BehaviourCloningConfig, DaggerConfig
      SFTConfig         from demonstrations

A custom algorithm is a subclass in a separate module (docs/own_algorithm.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.env import EnvConfig
from rlinf_embodied.config.language import Precision
from rlinf_embodied.config.learning import require_phases
from rlinf_embodied.config.machine import require_no_cores
from rlinf_embodied.config.run import Exactness

if TYPE_CHECKING:
    from rlinf_embodied.config.commands import TrainConfig


@dataclass(frozen=True, slots=True)
class Resampling:
    """Rollouts are repeated until enough groups of episodes differ in their success."""

    num_groups: int  # of a rollout
    min_groups: int  # that suffice
    drop: bool  # whether groups without a difference are dropped
    max_rounds: int


class Source(StrEnum):
    """What an algorithm learns from."""

    rollouts = "rollouts"  # whole rollouts of the weights that are trained, used once
    transitions = "transitions"  # single env steps from the replay buffer
    demonstrations = "demonstrations"  # episodes of files or of the scripted expert, again and again


class Level(StrEnum):
    """How far log-probs are summed before a ratio is formed."""

    token = "token"
    action = "action"
    chunk = "chunk"


class Reduction(StrEnum):
    """How gradients are summed over workers."""

    auto = "auto"  # exact on a CPU, fast on an accelerator
    exact = "exact"  # along one fixed binary tree over blocks: the same bits for every plan and worker count
    fast = "fast"  # all-reduce


class Sharding(StrEnum):
    """Where the actor's weights and optimizer state live while it trains."""

    none = "none"  # whole, in each of its workers
    fsdp2 = "fsdp2"  # in slices over its workers, see docs/reasoning.md and docs/openvla.md


def require_correction(staleness: int, tis_cap: float | None) -> None:
    """Checks that samples of earlier weights are corrected for."""
    rule = f"with a staleness of {staleness} (of the plan, or plan.max_staleness) other weights sample than are trained"
    action = "correct for them with algorithm.tis_cap=2.0, or use plan.max_staleness=0"
    require(staleness == 0 or tis_cap is not None, "algorithm.tis_cap", tis_cap, rule, action)


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """What every algorithm has; a subclass adds its own numbers and says what it is."""

    name: ClassVar[str]  # for people
    implementation: ClassVar[str]  # dotted path of the class that learns, see algorithms/algorithm.py
    learns_from: ClassVar[Source]
    acts: ClassVar[bool] = True  # whether the policy acts in the env; otherwise it learns from `data` alone
    columns: ClassVar[tuple[str, ...]] = ()  # of the transitions that it needs, see algorithms/transitions.py
    policy_method: ClassVar[str] = "evaluate"  # that the policy must have

    _target_: str = ""  # dotted path of this dataclass; the files under configs/algorithm give it
    lr: float = 3e-4
    reduction: Reduction = Reduction.auto
    precision: Precision = Precision.float32  # of rollouts and passes, a critic on privileged state excepted
    compile: bool = False  # passes of the update, by torch.compile (docs/gymnasium.md)

    def __post_init__(self) -> None:
        require_numbers(self, "algorithm", "lr", low=0, above=True)

    def check(self, config: TrainConfig) -> None:
        """Checks the algorithm against the other sections of a training."""

    @property
    def same_start(self) -> int:
        """Rows of the env that start from one initial state."""
        return 1

    def resampling(self, env: EnvConfig) -> Resampling | None:
        """Returns how rollouts are repeated within an iteration; None: there is one."""
        return None

    def typical_iteration(self, env: EnvConfig) -> int:
        """Returns the first iteration that does all that later ones do."""
        return 0


@dataclass(kw_only=True, slots=True)
class OnPolicyConfig(AlgorithmConfig):
    """PPO and GRPO share the clipped objective; they differ in where advantages come from."""

    has_critic: ClassVar[bool] = False
    learns_from = Source.rollouts
    ratio_level: Level = Level.action  # log-probs are summed up to this level before a ratio is formed
    clip_low: float = 0.2
    clip_high: float = 0.2
    epochs: int = 4
    num_minibatches: int = 5  # a minibatch is one slice of every block
    lr: float = 1.5e-4
    lr_end_fraction: float = 0.3  # lr decays linearly to this fraction at the last iteration
    max_grad_norm: float = 0.5
    entropy_coef: float = 0.0
    sharding: Sharding = Sharding.none  # of the policy while it trains; a critic is never sharded
    rows_per_microbatch: int | None = None  # chunks in one forward-backward pass; None: a block's part of a minibatch
    ratio_tolerance: float | None = None  # of |log ratio| before the first step; None: 1e-5 on CPUs in float32
    tis_cap: float | None = None  # truncated importance sampling: largest pi_training / pi_rollout; None: no correction
    target_kl: float | None = 0.05  # the policy epochs of an iteration end when a minibatch exceeds it
    # PPO
    gamma: float = 0.99  # per env step; with less, haste is worth more than a lasting success
    gae_lambda: float = 0.97  # per env step
    bootstrap_at_timeout: bool = False  # false: a time-out counts as terminal (right for a critic that sees the time)
    value_lr: float = 1e-3  # of what only the critic has
    value_epochs: int = 8  # where critic and policy share parameters at least `epochs`, as one pass trains both
    value_max_grad_norm: float = 1.0  # of a separate critic, or one that makes a step alone
    one_optimizer: bool = False  # of policy and critic, on the sum of both losses, with epochs, lr and max_grad_norm
    value_coef: float = 0.5  # of the value loss in that sum; it is made as well where the two share parameters
    critic_warmup_iterations: int = 1  # iterations that train only what the policy does not use
    # GRPO
    group_size: int = 8  # episodes from one initial state
    success_only: bool = True  # the return of an episode is its success, not its shaped reward
    drop_zero_variance_groups: bool = True  # groups that all succeed or all fail are dropped (DAPO) ...
    max_resamples: int = 2  # ... and replaced by further rollouts, at most this many times
    min_groups: int = 8  # resample until this many groups are left
    length_normalized: bool = True  # every episode weighs the same, however long

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        counts = ("epochs", "num_minibatches", "group_size", "min_groups", "rows_per_microbatch")
        require_numbers(self, "algorithm", *counts, low=1)
        optional = ("ratio_tolerance", "target_kl", "tis_cap")
        require_numbers(self, "algorithm", "value_lr", *optional, low=0, above=True)
        more = ("critic_warmup_iterations", "max_resamples", "value_coef", "entropy_coef")
        require_numbers(self, "algorithm", "value_epochs", *more, low=0)
        whole = self.sharding is Sharding.none or not (self.compile or self.one_optimizer)
        rule = "passes over a policy in slices are not compiled, and it has a separate optimizer"
        require(whole, "algorithm.sharding", self.sharding.value, rule, "use none")
        bounds = ("clip_low", "clip_high", "max_grad_norm", "value_max_grad_norm")  # an infinite one is none
        require_numbers(self, "algorithm", *bounds, above=True, high=math.inf)
        require_numbers(self, "algorithm", "gamma", "gae_lambda", "lr_end_fraction", high=1)

    def check(self, config: TrainConfig) -> None:
        rule, resets = "a pass is compiled for one number of rows, which blocks have with resets", config.env.auto_reset
        require(
            resets or not self.compile, "algorithm.compile", self.compile, rule, "set env.auto_reset=true, or false"
        )


@dataclass(kw_only=True, slots=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation (arXiv:1707.06347) with a critic."""

    name = "ppo"
    implementation = "rlinf_embodied.algorithms.ppo.PPO"
    has_critic = True

    def typical_iteration(self, env: EnvConfig) -> int:
        return self.critic_warmup_iterations


@dataclass(kw_only=True, slots=True)
class GRPOConfig(OnPolicyConfig):
    """Group-relative policy optimisation (arXiv:2402.03300): episodes of a group are compared, without a critic."""

    name = "grpo"
    implementation = "rlinf_embodied.algorithms.grpo.GRPO"

    def __post_init__(self) -> None:
        OnPolicyConfig.__post_init__(self)
        rule = "GRPO compares episodes of a group, so a group needs at least two"
        require(self.group_size >= 2, "algorithm.group_size", self.group_size, rule, "use 8")

    @property
    def same_start(self) -> int:
        return self.group_size

    def resampling(self, env: EnvConfig) -> Resampling:
        drop = self.drop_zero_variance_groups
        return Resampling(env.num_envs // self.group_size, self.min_groups, drop, 1 + (self.max_resamples * drop))

    def check(self, config: TrainConfig) -> None:
        OnPolicyConfig.check(self, config)
        env, size = config.env, self.group_size
        whole, rule = env.block_size % size == 0, f"a group of algorithm.group_size={size} episodes stays in a block"
        require(whole, "env.block_size", env.block_size, rule, "make the block a multiple of the group")
        rule = "GRPO compares whole episodes, one per row"
        require(not env.auto_reset, "env.auto_reset", env.auto_reset, rule, "set env.auto_reset=false")
        few, rule = self.min_groups <= env.num_envs // size, f"env.num_envs={env.num_envs} rows hold fewer groups"
        require(few, "algorithm.min_groups", self.min_groups, rule, "use fewer groups or more envs")


def require_exact(exact: Exactness, path: str, reduction: Reduction, compile: bool = False) -> None:
    """Checks that what a learner's section `path` asks for keeps the promise of run.exact."""
    holds, rule = reduction is not Reduction.fast or not exact.holds, "run.exact=true needs sums in a fixed order"
    require(holds, f"{path}.reduction", reduction.value, rule, f"set run.exact=false or {path}.reduction=auto")
    holds = not compile or exact is not Exactness.portable
    rule = "run.exact=portable promises the bits of every processor, and a compiler makes this one's kernels"
    require(holds, f"{path}.compile", compile, rule, f"set run.exact=exact (every plan, here) or {path}.compile=false")


# ------------------------------------------------------------------------------------------------------- transitions
_ALL = ("state", "action", "reward", "next_state", "terminated")


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """When and from how much an algorithm with a replay buffer learns in a training."""

    rows: int  # transitions of a block in a batch
    demonstration_rows: int  # of these demonstrations, as long as there are both
    updates: int  # in an iteration that learns
    steps: int  # env steps of an iteration over all rows
    expert_iterations: int  # iterations in which the scripted expert acts
    first_update: int  # the first iteration that learns


@dataclass(kw_only=True, slots=True)
class ReplayConfig(AlgorithmConfig):
    """What algorithms that learn from transitions have in common."""

    learns_from = Source.transitions
    columns = _ALL
    policy_method = "sample"
    sees_images: ClassVar[bool] = False  # whether transitions hold images where the env has cameras
    mixes: ClassVar[bool] = False  # whether demonstrations are a share of each batch

    batch_size: int = 256  # transitions per update, an equal part of every block
    capacity: int = 1_000_000  # transitions over all blocks; the oldest ones make room
    expert_steps: int = 0  # env steps of the scripted expert before all else
    demonstration_share: float = 0.5  # of a batch, as long as there are demonstrations
    warmup_steps: int = 1_000  # env steps of uniform actions before the first update, rounded up to whole iterations
    updates_per_step: float = 1.0  # updates per env step
    updates_per_iteration: int = 500  # where nothing acts, from `data` alone

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        require_numbers(self, "algorithm", "batch_size", "capacity", "updates_per_iteration", low=1)
        require_numbers(self, "algorithm", "updates_per_step", low=0, above=True)
        require_numbers(self, "algorithm", "warmup_steps", "expert_steps")
        require_numbers(self, "algorithm", "demonstration_share", high=1)

    def schedule(self, env: EnvConfig) -> ReplaySchedule:
        """Returns what the numbers come to with an env."""
        rows, steps = self.batch_size // env.num_blocks, env.num_envs * env.chunks_per_rollout
        expert, first = -(-self.expert_steps // steps), 0
        updates = self.updates_per_iteration
        if self.acts:
            first = expert + -(-self.warmup_steps // steps)
            updates = max(1, round(self.updates_per_step * steps))
        return ReplaySchedule(rows, round(rows * self.demonstration_share), updates, steps, expert, first)

    def typical_iteration(self, env: EnvConfig) -> int:
        return self.schedule(env).first_update

    def check(self, config: TrainConfig) -> None:
        env = config.env
        require(env.chunk == 1, "env.chunk", env.chunk, "a transition is one env step", "use env.chunk=1")
        rule = "every row steps in every chunk-step, so that updates per env step mean something"
        require(env.auto_reset, "env.auto_reset", env.auto_reset, rule, "set env.auto_reset=true")
        rule = f"the critics of {self.name} see a state, not images"
        require(self.sees_images or not env.cameras, "env.cameras", list(env.cameras), rule, "use env.cameras=[]")
        for name in ("batch_size", "capacity"):
            value = getattr(self, name)
            rule = f"each of the env.num_envs / env.block_size = {env.num_blocks} blocks holds an equal part"
            action = f"use {max(1, value // env.num_blocks) * env.num_blocks}"
            require(value % env.num_blocks == 0, f"algorithm.{name}", value, rule, action)
        gathered = env.num_envs * env.chunks_per_rollout
        rule = f"an iteration gathers env.num_envs x env.chunks_per_rollout = {gathered}"
        require(self.capacity >= gathered, "algorithm.capacity", self.capacity, rule, "use at least that")
        temperature, rule = config.policy.temperature, "the objective is about the log-probs of its distribution"
        require(temperature == 1 or self.sees_images, "policy.temperature", temperature, rule, "use 1.0")
        self._check_data(env, config.files, config.data)

    def _check_data(self, env: EnvConfig, files: Sequence[str], data: str | None) -> None:
        """Checks that there is something to learn from, and that batches hold demonstrations as they should."""
        rule, action = f"{self.name} learns from recorded transitions", "give data=<run.dir>/checkpoints/latest"
        require(self.acts or bool(files), "data", data, rule, action)
        steps, rule = self.expert_steps, f"data={data} holds the demonstrations"
        require(not (steps and files), "algorithm.expert_steps", steps, rule, "use 0, or leave data out")
        plan, share = self.schedule(env), self.demonstration_share
        mixed = self.mixes and (steps > 0 or bool(files)) and 0 < share < 1
        rule = f"of the {plan.rows} transitions of a block in a batch {plan.demonstration_rows} would be demonstrations"
        action = "use a larger algorithm.batch_size or env.block_size, or a share of 0 or 1"
        holds = not mixed or 0 < plan.demonstration_rows < plan.rows
        require(holds, "algorithm.demonstration_share", share, rule, action)


@dataclass(kw_only=True, slots=True)
class CriticsConfig(ReplayConfig):
    """An ensemble of critics Q(s, a) with targets that follow it."""

    gamma: float = 0.99  # per env step
    value_lr: float = 3e-4  # of the critics
    num_critics: int = 2
    target_critics: int = 2  # the target is the minimum over this many, drawn for each update if there are more (REDQ)
    critic_hidden_size: int = 256
    critic_layers: int = 2
    layer_norm: bool = False  # behind every hidden layer of the critics
    tau: float = 0.005  # how far targets move towards the critics per update

    def __post_init__(self) -> None:
        ReplayConfig.__post_init__(self)
        counts = ("num_critics", "target_critics", "critic_hidden_size", "critic_layers")
        require_numbers(self, "algorithm", *counts, low=1)
        require_numbers(self, "algorithm", "value_lr", low=0, above=True)
        require(0 <= self.gamma < 1, "algorithm.gamma", self.gamma, "it lies in [0, 1)", "use 0.99")
        require_numbers(self, "algorithm", "tau", above=True, high=1)
        few, number = self.target_critics <= self.num_critics, self.num_critics
        rule = f"the target is the minimum over some of algorithm.num_critics={number}"
        require(few, "algorithm.target_critics", self.target_critics, rule, f"use at most {number}")


@dataclass(kw_only=True, slots=True)
class SACConfig(CriticsConfig):
    """Soft actor-critic (arXiv:1812.05905, table 1); with demonstrations and many critics RLPD (arXiv:2302.02948)."""

    name = "sac"
    implementation = "rlinf_embodied.algorithms.sac.SAC"
    mixes = True

    policy_period: int = 1  # updates of the critics per update of the policy, counted over iterations
    pessimistic_policy: bool = True  # the policy climbs the minimum over all critics; false: their mean
    entropy_coef: float | None = None  # null: learned
    initial_entropy_coef: float = 1.0  # of one that is learned
    entropy_per_dimension: float = -1.0  # of an action: what a learned coefficient keeps the entropy at
    entropy_in_target: bool = True  # whether the critics' target holds the entropy of the next action

    def __post_init__(self) -> None:
        CriticsConfig.__post_init__(self)
        require_numbers(self, "algorithm", "policy_period", low=1)
        require_numbers(self, "algorithm", "initial_entropy_coef", low=0, above=True)
        require_numbers(self, "algorithm", "entropy_coef", low=0)


@dataclass(kw_only=True, slots=True)
class IQLConfig(CriticsConfig):
    """Implicit Q-learning from recorded transitions alone (arXiv:2110.06169)."""

    name = "iql"
    implementation = "rlinf_embodied.algorithms.iql.IQL"
    acts = False

    expectile: float = 0.7  # of Q over the recorded actions, which V is
    advantage_scale: float = 3.0  # of exp(scale (Q - V)), the weight of a recorded action ...
    advantage_limit: float = 100.0  # ... and its largest value

    def __post_init__(self) -> None:
        CriticsConfig.__post_init__(self)
        require_numbers(self, "algorithm", "advantage_scale", low=0)
        require_numbers(self, "algorithm", "advantage_limit", low=0, above=True)
        require(0 < self.expectile < 1, "algorithm.expectile", self.expectile, "it lies in (0, 1)", "use 0.7")


@dataclass(kw_only=True, slots=True)
class BehaviourCloningConfig(ReplayConfig):
    """The policy learns to do what was done in recorded transitions."""

    name = "bc"
    implementation = "rlinf_embodied.algorithms.imitation.Imitation"
    acts = False
    columns = ("state", "action")
    policy_method = "imitation_loss"
    sees_images = True


@dataclass(kw_only=True, slots=True)
class DaggerConfig(BehaviourCloningConfig):
    """DAgger (arXiv:1011.0686): the policy acts and learns what the scripted expert would have done there."""

    name = "dagger"
    acts = True
    columns = ("state", "expert_action")

    def check(self, config: TrainConfig) -> None:
        rule = "DAgger learns from what it gathers"
        require(not config.files, "data", config.data, rule, "leave it out")
        rule = "DAgger begins with what the expert does"
        require(self.expert_steps > 0, "algorithm.expert_steps", self.expert_steps, rule, "use 2000")
        ReplayConfig.check(self, config)


# ---------------------------------------------------------------------------------------------------- demonstrations
@dataclass(kw_only=True, slots=True)
class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on demonstrations: those of `data`, or those of a warm start.

    An iteration is an epoch.
    """

    name = "sft"
    implementation = "rlinf_embodied.algorithms.imitation.FineTuning"
    learns_from = Source.demonstrations
    acts = False
    policy_method = "imitation_loss"

    epochs: int = 7  # of the whole policy
    head_epochs: int = 38  # then, of everything but the stem, on cached features
    batch_size: int = 32  # chunks
    head_batch_size: int = 32
    lr: float = 1e-3
    head_lr: float = 2e-3
    warmup: float = 0.1  # share of a phase's steps in which the learning rate rises
    held_out: float = 0.1  # share of the episodes that nothing is learned from; their loss is reported
    reduction: Reduction = Reduction.exact  # on accelerators as well: a cached policy is the same for all of them

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        require_phases(self, "algorithm")
        require_numbers(self, "algorithm", "warmup", high=1)
        require_numbers(self, "algorithm", "held_out", high=0.5)
        require(not self.compile, "algorithm.compile", True, "passes of fine-tuning are not compiled", "use false")

    @property
    def num_epochs(self) -> int:
        """Epochs of both phases."""
        return self.epochs + self.head_epochs

    def check(self, config: TrainConfig) -> None:
        require_no_cores(config.cluster)
        target, rule = config.run.until_success, "fine-tuning continues for its epochs"
        require(target is None, "run.until_success", target, rule, "leave it out")
        number, epochs = config.run.num_iterations, self.num_epochs
        rule = f"an iteration is an epoch, and algorithm.epochs + algorithm.head_epochs = {epochs}"
        require(number == epochs, "run.num_iterations", number, rule, "leave it out, and set algorithm.epochs")
