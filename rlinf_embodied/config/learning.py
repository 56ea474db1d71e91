"""The sections `policy`, `algorithm`, `warm_start` and `sft`: what is trained, how, and what it starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlinf_embodied.config.checks import require
from rlinf_embodied.config.language import Precision
from rlinf_embodied.config.run import Exactness


class Critic(StrEnum):
    """What the value head sees."""

    privileged = "privileged"  # the simulator's state (training only)
    observation = "observation"  # the policy's own features


_SIZES = (
    *("stem_width", "keypoints", "instruction_length", "hidden_size", "num_layers", "num_heads"),
    "critic_hidden_size",
)  # of a policy


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """A policy and its size."""

    _target_: str = "policies.tiny_vla.TinyVLA"
    name: str = "tiny_vla"
    num_bins: int = 33  # values per action dimension
    stem_width: int = 64  # channels of the convolutional stem
    keypoints: int = 32  # spatial-softmax keypoints per camera
    instruction_length: int = 8  # word tokens; the rest of a longer instruction is folded into the last one
    hidden_size: int = 128  # of the causal transformer
    num_layers: int = 2
    num_heads: int = 4
    critic: Critic = Critic.privileged
    critic_hidden_size: int = 256
    freeze_stem: bool = True  # in RL: its feature maps are cached with the rollout
    temperature: float = 0.4  # of sampling, and of the log-probs alike; evaluation is greedy: not too far from that
    initial_std: float = 0.5  # of the actions of a new state policy
    options: dict[str, Any] = field(default_factory=dict)  # a policy's own, see docs/openvla.md, docs/own_policy.md

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            require(value >= 1, f"policy.{name}", value, "it must be at least 1", "use a positive number")
        require(self.num_bins >= 2, "policy.num_bins", self.num_bins, "a token needs at least two values", "use 33")
        require(self.temperature > 0, "policy.temperature", self.temperature, "it must be positive", "use 0.6 or 1.0")
        require(self.initial_std > 0, "policy.initial_std", self.initial_std, "it must be positive", "use 0.5")
        require(
            self.hidden_size % self.num_heads == 0,
            "policy.hidden_size",
            self.hidden_size,
            f"it must be a multiple of policy.num_heads={self.num_heads}",
            "change one of the two",
        )


class AlgorithmName(StrEnum):
    """The reinforcement-learning algorithm."""

    ppo = "ppo"
    grpo = "grpo"


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
    """Checks that samples of earlier weights are corrected for.

    Raises:
        ConfigError: they are not.
    """
    require(
        staleness == 0 or tis_cap is not None,
        "algorithm.tis_cap",
        tis_cap,
        f"with a staleness of {staleness} (plan.max_staleness, or the plan's) other weights sample than are trained, "
        "and truncated importance weights correct for them",
        "use algorithm.tis_cap=2.0, or plan.max_staleness=0",
    )


def require_ratio_bounds(
    clip_high: float, dual_clip: float | None, max_log_ratio: float, tis_cap: float | None
) -> None:
    """Checks what bounds importance ratios beside the clip range.

    Raises:
        ConfigError: a bound is of no use.
    """
    rule = f"it bounds ratios behind 1 + algorithm.clip_high={clip_high:g}"
    above = dual_clip is None or dual_clip > 1 + clip_high
    require(above, "algorithm.dual_clip", dual_clip, rule, "use 3.0, or null for no bound")
    rule = "beyond 80 a float32 overflows, and at 0 nothing is learned"
    require(0 < max_log_ratio <= 80, "algorithm.max_log_ratio", max_log_ratio, rule, "use 20.0")
    capped = tis_cap is None or tis_cap > 0
    require(capped, "algorithm.tis_cap", tis_cap, "it must be positive", "use 2.0, or null")


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """PPO and GRPO share the clipped objective; they differ in where advantages come from."""

    name: AlgorithmName = AlgorithmName.ppo
    ratio_level: Level = Level.action  # log-probs are summed up to this level before a ratio is formed
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = (
        None  # largest ratio that counts where the advantage is negative, for example 3; None: any
    )
    max_log_ratio: float = 20.0  # largest |log ratio| that counts: e^20 is half a billion
    epochs: int = 4
    num_minibatches: int = 5  # a minibatch is one slice of every block
    lr: float = 1.5e-4
    lr_end_fraction: float = 0.3  # lr decays linearly to this fraction at the last iteration
    max_grad_norm: float = 0.5
    entropy_coef: float = 0.0
    sharding: Sharding = Sharding.none  # of the policy while it trains; a critic is never sharded
    precision: Precision = Precision.float32  # of rollouts and passes, a critic on privileged state excepted
    compile: bool = False  # passes of the update, by torch.compile (docs/gymnasium.md)
    rows_per_microbatch: int | None = None  # chunks in one forward-backward pass; None: a block's part of a minibatch
    ratio_tolerance: float | None = (
        None  # of |log ratio| before the first step; None: 1e-5, or any off a CPU and in bfloat16
    )
    tis_cap: float | None = (
        None  # truncated importance sampling: largest pi_training / pi_rollout of a ratio's entry; None: none
    )
    target_kl: float | None = 0.05  # the policy epochs of an iteration end when a minibatch exceeds it
    reduction: Reduction = Reduction.auto
    # PPO
    gamma: float = 0.99  # per env step; with less, haste is worth more than a lasting success
    gae_lambda: float = 0.97  # per env step
    bootstrap_at_timeout: bool = False  # false: a time-out counts as terminal (right for a critic that sees the time)
    value_lr: float = 1e-3  # of what only the critic has
    value_epochs: int = 8  # where critic and policy share parameters at least `epochs`, as one pass trains both
    value_clip: float | None = None  # how far a value may move per iteration; None: unclipped
    value_max_grad_norm: float = 1.0
    one_optimizer: bool = False  # of policy and critic, on the sum of both losses, with epochs, lr and max_grad_norm
    value_coef: float = 0.5  # of the value loss in that sum; it is made as well where the two share parameters
    critic_warmup_iterations: int = 1  # iterations that train only what the policy does not use
    # GRPO
    group_size: int = 8  # episodes from one initial state
    success_only: bool = True  # the return of an episode is its success, not its shaped reward
    drop_zero_variance_groups: bool = True  # groups that all succeed or all fail are dropped (DAPO) ...
    max_resamples: int = 2  # ... and replaced by further rollouts, at most so many
    min_groups: int = 8  # resample until so many groups are left
    length_normalized: bool = True  # every episode weighs the same, however long

    def __post_init__(self) -> None:
        for name in ("epochs", "num_minibatches", "group_size", "min_groups"):
            value = getattr(self, name)
            require(value >= 1, f"algorithm.{name}", value, "it must be at least 1", "use a positive number")
        whole, rule = self.sharding is Sharding.none, "passes over a policy in slices are not compiled"
        require(whole or not self.compile, "algorithm.compile", self.compile, rule, "use algorithm.sharding=none")
        rule = "a policy in slices has an optimizer of its own"
        require(whole or not self.one_optimizer, "algorithm.one_optimizer", True, rule, "use algorithm.sharding=none")
        trains_critic, rule = self.name is AlgorithmName.ppo, "GRPO has no critic"
        require(trains_critic or not self.one_optimizer, "algorithm.one_optimizer", True, rule, "use false")
        for name in ("lr", "value_lr", "clip_low", "clip_high", "max_grad_norm", "value_max_grad_norm"):
            value = getattr(self, name)
            bounded = name in ("lr", "value_lr")  # an infinite bound is none
            holds = 0 < value < math.inf if bounded else value > 0
            require(holds, f"algorithm.{name}", value, "it must be positive", "use a positive number")
        for name in ("value_epochs", "critic_warmup_iterations", "max_resamples", "value_coef", "entropy_coef"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"algorithm.{name}", value, "it must not be negative", "use 0")
        require_ratio_bounds(self.clip_high, self.dual_clip, self.max_log_ratio, self.tis_cap)
        for name in ("rows_per_microbatch", "ratio_tolerance", "target_kl", "value_clip"):
            value = getattr(self, name)
            require(value is None or value > 0, f"algorithm.{name}", value, "it must be positive", "use null")
        for name in ("gamma", "gae_lambda", "lr_end_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"algorithm.{name}", value, "it must lie in [0, 1]", "use 0.97 or so")
        require(
            self.name is not AlgorithmName.grpo or self.group_size >= 2,
            "algorithm.group_size",
            self.group_size,
            "GRPO compares episodes of a group, so a group needs at least two",
            "use 8",
        )


def require_exact(exact: Exactness, path: str, reduction: Reduction, compile: bool = False) -> None:
    """Checks that what a learner's section `path` asks for keeps the promise of run.exact."""
    holds, rule = reduction is not Reduction.fast or not exact.holds, "run.exact=true needs sums in a fixed order"
    require(holds, f"{path}.reduction", reduction.value, rule, f"set run.exact=false or {path}.reduction=auto")
    holds = not compile or exact is not Exactness.portable
    rule = "run.exact=portable promises the bits of every processor, and a compiler makes this one's kernels"
    require(holds, f"{path}.compile", compile, rule, f"set run.exact=exact (every plan, here) or {path}.compile=false")


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """The policy that RL starts from: the scripted expert's clone, unless one of the first four says otherwise."""

    checkpoint: str | None = None  # a checkpoint folder
    demonstrations: str | None = None  # clone these: a ManiSkill trajectory file (.h5), or a LeRobot v3 folder
    teacher: str | None = None  # clone this checkpoint's policy on the simulator's state: it acts as the expert would
    from_nothing: bool = False  # a new policy
    num_demos: int = 480  # PickCube clones of 480 solve 99 %, of 240 87 (docs/results/recipe.md)
    region: list[float] | None = None  # demonstrations begin with the object here: x from, x to, y from, y to, metres
    noise: list[float] = field(default_factory=lambda: [0.0, 0.05, 0.1, 0.3])  # of the expert's actions, by episode
    noise_steps: int = 15  # the largest noise lasts so many steps only
    epochs: int = 7  # of the whole policy
    head_epochs: int = 38  # of everything but the stem, on cached features; with a third of them clones failed
    batch_size: int = 32
    head_batch_size: int = 32
    lr: float = 1e-3
    head_lr: float = 2e-3
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it

    def __post_init__(self) -> None:
        ways = {name: getattr(self, name) for name in ("checkpoint", "demonstrations", "teacher", "from_nothing")}
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            name, other = given[:2]
            rule = f"warm_start.{other} is {ways[other]!r}, and training starts from one policy"
            require(False, f"warm_start.{name}", ways[name], rule, "give one of the two")
        rule = "each of the 4 blocks of demonstrations needs at least one"
        require(self.num_demos >= 4, "warm_start.num_demos", self.num_demos, rule, "use 480")
        for name in ("batch_size", "head_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"warm_start.{name}", value, "it must be at least 1", "use 32")
        for name in ("epochs", "head_epochs", "noise_steps"):
            value = getattr(self, name)
            require(value >= 0, f"warm_start.{name}", value, "it must not be negative", "use 0 for none")
        for name in ("lr", "head_lr"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"warm_start.{name}", value, "it must be positive", "use 1e-3")
        region, rule = self.region, "it is a rectangle on the table: x from, x to, y from, y to, in metres"
        known = region is None or (len(region) == 4 and region[0] < region[1] and region[2] < region[3])
        require(known, "warm_start.region", region, rule, "use [-0.1,0.1,0,0.1], or null for the whole table")
        holds, rule = self.noise and min(self.noise) >= 0, "it holds at least one level, and none is negative"
        require(bool(holds), "warm_start.noise", self.noise, rule, "use [0.0]")


@dataclass(kw_only=True, slots=True)
class StartConfig:
    """What supervised fine-tuning has of the section `warm_start`, so that files under configs/ serve both commands."""

    from_nothing: bool = False  # set by policy=state; a policy that is fine-tuned without sft.checkpoint is new anyway
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it


class Schedule(StrEnum):
    """How a learning rate changes over the steps of a phase."""

    one_cycle = "one_cycle"  # up by a cosine, then down to nearly nothing
    cosine = "cosine"  # up in a straight line, then down to 0 by half a cosine
    linear = "linear"  # up in a straight line, then down to 0 in another
    constant = "constant"  # up in a straight line, then as it is


@dataclass(kw_only=True, slots=True)
class CloningConfig:
    """Supervised fine-tuning of a policy on demonstrations; the defaults are those of the warm start."""

    checkpoint: str | None = None  # a policy folder to start from, its statistics included; None: random weights
    epochs: int = 7  # of the whole policy
    head_epochs: int = 38  # then, of everything but the stem, on cached features
    batch_size: int = 32  # chunks
    head_batch_size: int = 32
    lr: float = 1e-3
    head_lr: float = 2e-3
    schedule: Schedule = Schedule.one_cycle  # of both phases
    warmup: float = 0.1  # share of a phase's steps in which the learning rate rises
    held_out: float = 0.1  # share of the episodes that nothing is learned from; their loss chooses the checkpoint
    keep_best: bool = True  # end with the weights of the lowest held-out loss, not with the last ones

    def __post_init__(self) -> None:
        for name in ("batch_size", "head_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"sft.{name}", value, "it must be at least 1", "use 32")
        for name in ("epochs", "head_epochs"):
            value = getattr(self, name)
            require(value >= 0, f"sft.{name}", value, "it must not be negative", "use 0 to leave the phase out")
        for name in ("lr", "head_lr"):
            value = getattr(self, name)
            require(value > 0, f"sft.{name}", value, "it must be positive", "use 1e-3")
        require(0 <= self.warmup < 1, "sft.warmup", self.warmup, "it is a share of steps, in [0, 1)", "use 0.1")
        rule = "it is a share of episodes, in [0, 0.5]"
        require(0 <= self.held_out <= 0.5, "sft.held_out", self.held_out, rule, "use 0.1, or 0 to learn from all")

    @property
    def num_epochs(self) -> int:
        """Epochs of both phases."""
        return self.epochs + self.head_epochs
