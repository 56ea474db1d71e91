"""What a VLA gives and takes: an observation in, tokens of a chunk of actions out; axes as in envs.py, B rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import Observation

Features = dict[str, Tensor]  # what a policy's frozen part made of an observation; every tensor has B rows


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Plain facts about a policy."""

    name: str
    chunk: int  # C
    action_dim: int  # A
    num_bins: int  # values per action token


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Actions sampled (or chosen) for B rows."""

    actions: Tensor  # float32 [B, C, A] in [-1, 1]: those of the tokens; greedy ones may lie between two bins
    tokens: Tensor  # int64 [B, C, A], index of the bin
    log_probs: Tensor  # float32 [B, C, A], under the distribution sampled from (temperature included)


@runtime_checkable
class Policy(Protocol):
    """A VLA: observation -> distribution over a chunk of action tokens, and a value per action.

    A policy draws nothing: it is handed its noise.  `encode` is the part that RL may cache with the rollout: what it
    contains is frozen during RL (or it hands the raw observation on where nothing is frozen).

    A class that inherits from this writes `spec`, `module`, and the methods from `encode` to `value_parameters`, `save`
    and `load`; what only cloning asks for is answered as a policy without a frozen part would (docs/own_policy.md).
    """

    spec: PolicySpec
    module: nn.Module

    def encode(self, observation: Observation) -> Features:
        """Returns what `act`, `evaluate` and `value` need of B rows; rows do not influence each other."""
        ...

    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples by inverting the cumulative distribution at `noise` [B, C, A] in (0, 1); None is greedy."""
        ...

    def evaluate(
        self, features: Features, tokens: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns (log_probs, entropy), both float32 [B, C, A], of given tokens, differentiable.

        Without `entropy_gradient` the entropy is a number to look at, and costs no memory until the backward pass.
        """
        ...

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, float32 [B, C].

        Args:
            features: of `encode`; may be {} unless policy.critic is observation.
            privileged: simulator state before each action, [B, C, Q]; None where the env shows none.
        """
        ...

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains in RL, in a fixed order (frozen parts left out)."""
        ...

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains in RL, in a fixed order; disjoint from `policy_parameters`."""
        ...

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

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed behaviour-cloning loss over the B rows (scalar).

        Args:
            features: of B rows.
            actions: float32 [B, C, A] in [-1, 1].
            targets: helper targets, for example "object_position" [B, 3] in metres.

        Raises:
            ConfigError: the policy cannot be cloned.
        """
        raise ConfigError(
            f"{type(self).__name__} has no imitation_loss, so it cannot be cloned: write that method, or start from "
            "random weights (warm_start.from_nothing=true) or a checkpoint (warm_start.checkpoint=<dir>)"
        )

    def save(self, folder: Path) -> None:
        """Writes config.json, model.safetensors and dataset_statistics.json (Hugging Face folder form)."""
        ...

    @classmethod
    def load(cls, folder: Path, config: PolicyConfig | None = None) -> Policy:
        """Returns the policy of a folder; `config` may change how it is used, not what it is.

        Raises:
            CheckpointError: the folder is missing, damaged, or holds a policy of another shape.
        """
        ...
