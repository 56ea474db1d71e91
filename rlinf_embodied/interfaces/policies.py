"""What a VLA gives and takes: an observation in, a chunk of actions out; axes as in envs.py, B rows.

What a policy chose is its own affair: action tokens, the steps of a denoising chain, or the actions themselves.  It
hands them out as a `Record`, which training gives back to it unread, with one log-prob for each of the K choices that
make up an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.randomness import normal, uniform

Features = dict[str, Tensor]  # what a policy's frozen part made of an observation; every tensor has B rows
Record = dict[str, Tensor]  # what a policy chose; every tensor has B rows
ACTION_IS_PAD = "action_is_pad"  # target of an imitation loss: bool [B, C], actions beyond the episode's end


def mean_of_rows(entries: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean [B] over the entries [B, C, D] of a row's actions; padded ones count as 0, as in LeRobot."""
    is_pad = targets.get(ACTION_IS_PAD)
    return (entries if is_pad is None else entries * ~is_pad[..., None]).mean((1, 2))


class Distribution(StrEnum):
    """What noise is drawn from."""

    uniform = "uniform"  # of (0, 1)
    normal = "normal"  # of mean 0 and standard deviation 1


@dataclass(frozen=True, slots=True)
class Noise:
    """What a policy is handed for each row, as Noise((5, 7)), which it turns into its choices."""

    shape: tuple[int, ...]
    distribution: Distribution = Distribution.uniform

    def draw(self, seed: int, purpose: str, *ids: int | Sequence[int] | np.ndarray) -> Tensor:
        """Returns float32 [B, *shape], keyed by (seed, purpose, ids); ids are numbers, or B of them."""
        make = uniform if self.distribution is Distribution.uniform else normal
        return torch.from_numpy(make(seed, purpose, *ids, shape=self.shape))


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Plain facts about a policy."""

    name: str
    chunk: int  # C
    action_dim: int  # A
    choices: int  # K per action, each with a log-prob: A where every dimension is a token
    noise: Noise  # that `act` is handed
    greedy_noise: Noise | None = None  # that greedy actions begin with: `act` is handed it with temperature 0


def token_spec(config: PolicyConfig, env: EnvSpec) -> PolicySpec:
    """Returns the facts about a policy that chooses a token for every dimension of every action."""
    return PolicySpec(config.name, env.chunk, env.action_dim, env.action_dim, Noise((env.chunk, env.action_dim)))


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Actions sampled (or chosen) for B rows."""

    actions: Tensor  # float32 [B, C, A] in [-1, 1], or in the units of the dataset that the policy learned from
    record: Record  # what `evaluate` needs to know of the choices
    log_probs: Tensor  # float32 [B, C, K], under the distribution sampled from (temperature included)
    values: Tensor | None = None  # float32 [B, C], where they come from the same forward pass

    def rows(self, rows: slice) -> PolicyOutput:
        record = {name: value[rows] for name, value in self.record.items()}
        values = None if self.values is None else self.values[rows]
        return PolicyOutput(self.actions[rows], record, self.log_probs[rows], values)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Choices of B rows, scored again; all are differentiable."""

    log_probs: Tensor  # float32 [B, C, K]
    entropy: Tensor | None = None  # float32 [B, C, K]; None where the distribution has none in closed form
    values: Tensor | None = None  # float32 [B, C], where they come from the same forward pass


@runtime_checkable
class Policy(Protocol):
    """A VLA: observation -> distribution over a chunk of actions, and a value per action.

    A policy draws nothing: it is handed its noise.  `encode` is the part that RL may cache with the rollout: what it
    contains is frozen during RL (or it hands the raw observation on where nothing is frozen).

    Where `policy_parameters` and `value_parameters` have some in common, one optimizer trains all of them on the sum of
    both losses (algorithm.value_coef); otherwise each loss has its own, but for algorithm.one_optimizer.
    """

    spec: PolicySpec
    module: nn.Module
    reads_published: ClassVar[bool] = False  # whether `from_folder` takes folders that others wrote
    has_entropy: ClassVar[bool] = True  # whether `evaluate` returns one

    def encode(self, observation: Observation) -> Features:
        """Returns what `act`, `evaluate` and `value` need of B rows; rows do not influence each other."""
        ...

    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Turns `noise` [B, *spec.noise.shape] into choices; None is greedy, and so is spec.greedy_noise at 0."""
        ...

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs of given choices, as `act` gave them at the same weights.

        Without `entropy_gradient` the entropy is a number to look at, and costs no memory until the backward pass.
        """
        ...

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, float32 [B, C], of the simulator's state [B, C, Q] there (None: unknown).

        Features may be {} unless policy.critic is observation.
        """
        ...

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains in RL, in a fixed order (frozen parts left out)."""
        ...

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains in RL, in a fixed order."""
        ...

    def save(self, folder: Path) -> None:
        """Writes config.json, model.safetensors and dataset_statistics.json (Hugging Face folder form)."""
        ...

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Policy:
        """Returns the policy of a folder.

        Args:
            folder: that `save` wrote, or one in the form in which such policies are published.
            env: what it acts in, for a published folder, which does not say; other folders know.
            config: may change how the policy is used, not what it is.

        Raises:
            CheckpointError: the folder is missing, damaged, or holds a policy of another shape.
        """
        ...


@runtime_checkable
class HasRunningStatistics(Protocol):
    """A policy that standardises by what its own rollouts show.

    The statistics are buffers of its module, so that weights on the wire and checkpoints hold them.  They change once
    per iteration, after its update: all that an iteration samples and trains on is standardised alike.
    """

    def statistics_sums(self, features: Features, returns: Tensor | None) -> Tensor:
        """Returns what `update_statistics` needs of M samples, float64 [D]: it adds up over blocks.

        `returns` are the critic's targets of all valid actions, float32 [*]; None without a critic.
        """
        ...

    def update_statistics(self, total: Tensor) -> None:
        """Takes the sum over all blocks in, float64 [D]; the same in every worker."""
        ...


@runtime_checkable
class HasValueFeatures(Protocol):
    """A policy whose critic reads what other parameters than its own have computed: once for all value epochs."""

    def value_features(self, features: Features) -> Features:
        """Returns what `value` computes V of by the critic's own parameters alone, without a gradient."""
        ...


@runtime_checkable
class ReparameterizedPolicy(Policy, Protocol):
    """A policy whose actions are differentiable functions of its parameters and of noise."""

    state_dim: int  # P of the observations that it acts on, which critics receive in addition to its actions

    def sample(self, features: Features, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions [B, C, A] in [-1, 1] and the logarithm of their density [B, C]; both have gradients."""
        ...

    def log_density(self, features: Features, actions: Tensor) -> Tensor:
        """Returns the logarithm of the density of given actions [B, C, A], float32 [B, C], with a gradient."""
        ...


@runtime_checkable
class ImitationPolicy(Policy, Protocol):
    """A policy that can be cloned from demonstrations, or begin with statistics of what it will see.

    A class that inherits from this writes what it must of `Policy`; the answers here are those of a policy without a
    frozen part that takes its inputs as they come and is not cloned.
    """

    proprio_jitter: ClassVar[float] = 0.005  # see FineTuningPhases.proprio_jitter
    imitation_noise: Noise | None = None  # that `imitation_loss` is handed as targets["noise"]

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains: the whole policy, or all but what `encode_frozen` computes."""
        return self.policy_parameters()

    def encode_trainable(self, observation: Observation) -> Features:
        """Returns features through which every parameter gets a gradient."""
        return self.encode(observation)

    def encode_frozen(self, observation: Observation) -> Features:
        """Returns features that hold what the frozen part computes, without a gradient."""
        return self.encode(observation)

    def pooled(self, features: Features) -> Tensor:
        """Returns what the statistics "vision" standardise, float32 [B, D]; D = 0 where there is nothing."""
        return next(iter(features.values())).new_zeros(len(next(iter(features.values()))), 0, dtype=torch.float32)

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Sets what an input is standardised with: "proprio", "privileged" or "vision", each [D]."""
        return

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes in statistics of the dataset that a new policy learns from, which then has its units.

        They are those of meta/stats.json, {"action": {"min": [A], "q01": [A], ...}, "observation.state": {...}}.
        """
        return

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed loss (scalar) of cloning B rows of actions, float32 [B, C, A] in [-1, 1] or data units.

        Targets: "action_is_pad", bool [B, C], where some actions lie beyond the episode's end and count nothing (see
        `mean_of_rows`); helpers, for example "object_position" [B, 3] in metres; "noise" where the policy asks for
        some, drawn anew each time.

        Raises:
            ConfigError: the policy cannot be cloned.
        """
        raise ConfigError(
            f"{type(self).__name__} has no imitation_loss, so it cannot be cloned: write that method, or start from "
            "random weights (warm_start.from_scratch=true) or a checkpoint (warm_start.checkpoint=<dir>)"
        )
