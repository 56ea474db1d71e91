"""The protocol of policies: observations in, action chunks out; axes as in envs.py, B rows.

The form of a choice is internal to a policy: action tokens, the steps of a denoising chain, or the actions themselves.
It returns them as a `Record`, which training passes back unread, with one log-prob for each of the K choices that
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

Features = dict[str, Tensor]  # output of a policy's frozen part for an observation; every tensor has B rows
Record = dict[str, Tensor]  # choices of a policy; every tensor has B rows
ACTION_IS_PAD = "action_is_pad"  # target of an imitation loss: bool [B, C], actions beyond the episode's end


def mean_of_rows(entries: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean [B] over the entries [B, C, D] of a row's actions; padded ones count as 0, as in LeRobot."""
    is_pad = targets.get(ACTION_IS_PAD)
    return (entries if is_pad is None else entries * ~is_pad[..., None]).mean((1, 2))


class Distribution(StrEnum):
    """Distribution of noise."""

    uniform = "uniform"  # of (0, 1)
    normal = "normal"  # of mean 0 and standard deviation 1


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise that a policy receives for each row and turns into choices, for example Noise((5, 7))."""

    shape: tuple[int, ...]
    distribution: Distribution = Distribution.uniform

    def draw(self, seed: int, purpose: str, *ids: int | Sequence[int] | np.ndarray) -> Tensor:
        """Returns float32 [B, *shape], keyed by (seed, purpose, ids); ids are numbers, or B of them."""
        make = uniform if self.distribution is Distribution.uniform else normal
        return torch.from_numpy(make(seed, purpose, *ids, shape=self.shape))


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Static description of a policy."""

    name: str
    chunk: int  # C
    action_dim: int  # A
    choices: int  # K per action, each with a log-prob; A if every dimension is a token
    noise: Noise  # input of `act`
    greedy_noise: Noise | None = None  # input of `act` for greedy actions, with temperature 0; None: no noise


def token_spec(config: PolicyConfig, env: EnvSpec) -> PolicySpec:
    """Returns the spec of a policy that chooses a token for every dimension of every action."""
    return PolicySpec(config.name, env.chunk, env.action_dim, env.action_dim, Noise((env.chunk, env.action_dim)))


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Actions sampled (or chosen) for B rows."""

    actions: Tensor  # float32 [B, C, A] in [-1, 1], or in the units of the dataset that the policy learned from
    record: Record  # input of `evaluate`
    log_probs: Tensor  # float32 [B, C, K], under the distribution sampled from (temperature included)
    values: Tensor | None = None  # float32 [B, C], if they come from the same forward pass

    def rows(self, rows: slice) -> PolicyOutput:
        record = {name: value[rows] for name, value in self.record.items()}
        values = None if self.values is None else self.values[rows]
        return PolicyOutput(self.actions[rows], record, self.log_probs[rows], values)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of recorded choices of B rows; all are differentiable."""

    log_probs: Tensor  # float32 [B, C, K]
    entropy: Tensor | None = None  # float32 [B, C, K]; None if the distribution has none in closed form
    values: Tensor | None = None  # float32 [B, C], if they come from the same forward pass


@runtime_checkable
class Policy(Protocol):
    """A VLA: observation -> distribution over a chunk of actions, and a value per action.

    A policy draws no random numbers: its noise is an argument.  RL may cache the result of `encode` with the rollout,
    so `encode` computes only parts that are frozen during RL (or returns the raw observation if nothing is frozen).

    If `policy_parameters` and `value_parameters` overlap, one optimizer trains all of them on the sum of both losses
    (algorithm.value_coef); otherwise each loss has its own optimizer, unless algorithm.one_optimizer is set.
    """

    spec: PolicySpec
    module: nn.Module
    reads_published: ClassVar[bool] = False  # whether `from_folder` reads published folders of other projects
    has_entropy: ClassVar[bool] = True  # whether `evaluate` returns one

    def encode(self, observation: Observation) -> Features:
        """Returns the input of `act`, `evaluate` and `value` for B rows; rows do not influence each other."""
        ...

    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Turns `noise` [B, *spec.noise.shape] into choices; None is greedy, and so is spec.greedy_noise at 0."""
        ...

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs of recorded choices, equal to those of `act` at the same weights.

        Without `entropy_gradient` the entropy is only reported, and needs no memory for a backward pass.
        """
        ...

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, float32 [B, C]; `privileged` is the state [B, C, Q] before it, or None.

        Features may be {} unless policy.critic is observation.
        """
        ...

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains in RL, in a fixed order, without frozen parts."""
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
            folder: written by `save`, or in the form in which such policies are published.
            env: the env's spec; needed for a published folder, which does not hold it.
            config: may change how the policy is used, but not its network.

        Raises:
            CheckpointError: the folder is missing, damaged, or holds a policy of another shape.
        """
        ...


@runtime_checkable
class HasRunningStatistics(Protocol):
    """A policy that standardises its inputs by running statistics of its rollouts.

    The statistics are buffers of its module, so sent weights and checkpoints hold them.  They change once per
    iteration, after its update, so sampling and training of an iteration use the same statistics.
    """

    def statistics_sums(self, features: Features, returns: Tensor | None) -> Tensor:
        """Returns sums over M samples for `update_statistics`, float64 [D], which are added over blocks.

        `returns` are the critic's targets of all valid actions, float32 [*]; None without a critic.
        """
        ...

    def update_statistics(self, total: Tensor) -> None:
        """Updates the statistics with the sum over all blocks, float64 [D], which is the same in every worker."""
        ...


@runtime_checkable
class HasValueFeatures(Protocol):
    """A policy whose critic reads features computed by other parameters, once for all value epochs."""

    def value_features(self, features: Features) -> Features:
        """Returns the inputs of the critic's own parameters in `value`, without a gradient."""
        ...


@runtime_checkable
class ReparameterizedPolicy(Policy, Protocol):
    """A policy whose actions are differentiable functions of its parameters and of noise."""

    state_dim: int  # P of its observations, which critics receive together with actions

    def sample(self, features: Features, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions [B, C, A] in [-1, 1] and the logarithm of their density [B, C]; both have gradients."""
        ...

    def log_density(self, features: Features, actions: Tensor) -> Tensor:
        """Returns the logarithm of the density of given actions [B, C, A], float32 [B, C], with a gradient."""
        ...


@runtime_checkable
class ImitationPolicy(Policy, Protocol):
    """A policy that can be cloned from demonstrations, or starts with statistics of its inputs.

    A subclass implements the methods of `Policy`.  The defaults suit a policy without a frozen part that does not
    standardise its inputs and cannot be cloned.
    """

    proprio_jitter: ClassVar[float] = 0.005  # see FineTuningPhases.proprio_jitter
    imitation_noise: Noise | None = None  # passed to `imitation_loss` as targets["noise"]

    @property
    def relative_actions(self) -> Sequence[bool]:
        """For each dimension of an action, whether it is relative to the state at its chunk's start; empty: none."""
        return ()

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains: the whole policy, or everything but the parts of `encode_frozen`."""
        return self.policy_parameters()

    def encode_trainable(self, observation: Observation) -> Features:
        """Returns features through which every parameter gets a gradient."""
        return self.encode(observation)

    def encode_frozen(self, observation: Observation) -> Features:
        """Returns features computed by the frozen part, without a gradient."""
        return self.encode(observation)

    def pooled(self, features: Features) -> Tensor:
        """Returns the features that the statistics "vision" standardise, float32 [B, D]; D = 0 for none."""
        return next(iter(features.values())).new_zeros(len(next(iter(features.values()))), 0, dtype=torch.float32)

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Sets mean and standard deviation [D] of the input "proprio", "privileged" or "vision"."""
        return

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Sets the statistics of the dataset that a new policy learns from, whose units it then uses.

        The form is that of meta/stats.json, {"action": {"min": [A], "q01": [A], ...}, "observation.state": {...}}.
        """
        return

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed loss (scalar) of cloning B rows of actions, float32 [B, C, A] in [-1, 1] or data units.

        Targets: "action_is_pad", bool [B, C], for actions beyond the episode's end, which do not count (see
        `mean_of_rows`); auxiliary ones such as "object_position" [B, 3] in metres; "noise", drawn anew for each call,
        if the policy has `imitation_noise`.

        Raises:
            ConfigError: the policy cannot be cloned.
        """
        raise ConfigError(
            f"{type(self).__name__} has no imitation_loss, so it cannot be cloned: write that method, or start from "
            "random weights (warm_start.from_scratch=true) or a checkpoint (warm_start.checkpoint=<dir>)"
        )
