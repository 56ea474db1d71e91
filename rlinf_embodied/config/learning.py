"""The sections `policy`, `algorithm` and `warm_start`: what is trained, how, and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlinf_embodied.config.checks import require


class Critic(StrEnum):
    """What the value head sees."""

    privileged = "privileged"  # the simulator's state (training only)
    observation = "observation"  # the policy's own features


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
    temperature: float = 0.6  # of sampling, and of the log-probs alike

    def __post_init__(self) -> None:
        require(self.num_bins >= 2, "policy.num_bins", self.num_bins, "a token needs at least two values", "use 33")
        require(self.temperature > 0, "policy.temperature", self.temperature, "it must be positive", "use 0.6 or 1.0")
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

    exact = "exact"  # along one fixed binary tree over blocks: the same bits for every plan and worker count
    fast = "fast"  # all-reduce


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """PPO and GRPO share the clipped objective; they differ in where advantages come from."""

    name: AlgorithmName = AlgorithmName.ppo
    ratio_level: Level = Level.action  # log-probs are summed up to this level before a ratio is formed
    clip_low: float = 0.2
    clip_high: float = 0.2
    epochs: int = 4
    num_minibatches: int = 5  # a minibatch is one slice of every block
    lr: float = 1.5e-4
    lr_end_fraction: float = 0.3  # lr decays linearly to this fraction at the last iteration
    max_grad_norm: float = 0.5
    entropy_coef: float = 0.0
    target_kl: float | None = 0.05  # the policy epochs of an iteration end when a minibatch exceeds it
    reduction: Reduction = Reduction.exact
    # PPO
    gamma: float = 0.97  # per env step
    gae_lambda: float = 0.95  # per env step
    bootstrap_at_timeout: bool = False  # false: a time-out counts as terminal (right for a critic that sees the time)
    value_lr: float = 1e-3
    value_epochs: int = 8
    value_clip: float | None = None  # how far a value may move per iteration; None: unclipped
    value_max_grad_norm: float = 1.0
    critic_warmup_iterations: int = 1  # iterations that train the critic only
    # GRPO
    group_size: int = 8  # episodes from one initial state
    success_only: bool = True  # the return of an episode is its success, not its shaped reward
    drop_uniform_groups: bool = True  # groups without spread in the raw success are dropped ...
    max_refills: int = 2  # ... and refilled by further rollouts, at most so many
    min_groups: int = 8  # refill until so many groups are left
    length_normalized: bool = True  # every episode weighs the same, however long

    def __post_init__(self) -> None:
        for name in ("epochs", "num_minibatches", "group_size", "min_groups"):
            value = getattr(self, name)
            require(value >= 1, f"algorithm.{name}", value, "it must be at least 1", "use a positive number")
        for name in ("lr", "value_lr", "clip_low", "clip_high", "max_grad_norm"):
            value = getattr(self, name)
            require(value > 0, f"algorithm.{name}", value, "it must be positive", "use a positive number")
        for name in ("gamma", "gae_lambda"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"algorithm.{name}", value, "it must lie in [0, 1]", "use 0.97 or so")
        require(
            self.name is not AlgorithmName.grpo or self.group_size >= 2,
            "algorithm.group_size",
            self.group_size,
            "GRPO compares episodes of a group, so a group needs at least two",
            "use 8",
        )


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """The imitation checkpoint that RL starts from."""

    checkpoint: str | None = None  # a checkpoint folder; None: demonstrations of the scripted expert are cloned
    num_demos: int = 120  # about half of the clone's PickCube episodes succeed then: RL has room above
    noise: list[float] = field(default_factory=lambda: [0.0, 0.05, 0.1, 0.3])  # of the expert's actions, by episode
    noise_steps: int = 15  # the largest noise lasts so many steps only
    epochs: int = 24  # of the whole policy
    head_epochs: int = 120  # of everything but the stem, on cached features
    batch_size: int = 32
    head_batch_size: int = 64
    lr: float = 1e-3
    head_lr: float = 2e-3
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it

    def __post_init__(self) -> None:
        rule = "each of the 4 blocks of demonstrations needs at least one"
        require(self.num_demos >= 4, "warm_start.num_demos", self.num_demos, rule, "use 120")
        for name in ("batch_size", "head_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"warm_start.{name}", value, "it must be at least 1", "use 32")
        require(bool(self.noise), "warm_start.noise", self.noise, "it holds at least one level", "use [0.0]")
