"""Value heads with one value before each of the C actions of a chunk; standardisation of inputs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.interfaces.policies import Features

HIDDEN = "hidden"  # feature: hidden states of the policy's network, the input of a critic on observations
_LIMIT = 10.0  # standard deviations: RL leaves the range of the demonstrations, to which the scale was fitted
_VISION_FLOOR = 1e-3  # smallest standard deviation of pooled vision


class Standardise(nn.Module):
    """Shifts and scales columns by fixed statistics."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    @torch.no_grad()
    def set(self, mean: Tensor, std: Tensor, floor: float = 0.01) -> None:
        """Sets the statistics [size]; a std below `floor` is raised to it, and constant columns are not scaled."""
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std < 1e-6, torch.ones_like(std), std.clamp(min=floor)))

    def forward(self, x: Tensor) -> Tensor:
        """Standardises [..., size]."""
        return ((x - self.mean) / self.std).clamp(-_LIMIT, _LIMIT)


class Standardises:
    """A policy whose module has a `Standardise` called <name>_scale for each input that it standardises."""

    module: Any

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Sets the statistics of "proprio" [P], "vision" (see `pooled`) or "privileged" [Q].

        They are computed on the initial training data; inputs that the policy does not have are ignored.
        """
        scale = getattr(self.module, f"{name}_scale", None)
        if scale is not None and scale.mean.numel() > 0:
            scale.set(mean, std, *([_VISION_FLOOR] if name == "vision" else []))


class Criticised(Standardises):
    """A policy whose critic reads privileged state, or hidden states of the policy's network without a gradient."""

    config: PolicyConfig
    _critic: ClassVar[str] = "value"  # its name in the module

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, float32 [B, C]; `privileged` is [B, C, Q]."""
        critic = getattr(self.module, self._critic)
        if self.config.critic is Critic.privileged:
            assert privileged is not None, "a privileged critic was handed no privileged state"
            return critic(self.module.privileged_scale(privileged))
        return critic(self.value_features(features)[HIDDEN])

    @torch.no_grad()
    def value_features(self, features: Features) -> Features:
        return features if HIDDEN in features else {HIDDEN: self._hidden(features)}

    def _hidden(self, features: Features) -> Tensor:
        """Returns the hidden states that a critic on observations reads."""
        raise NotImplementedError

    def value_parameters(self) -> list[nn.Parameter]:
        return list(getattr(self.module, self._critic).parameters())


class ValueHead(nn.Module):
    """A tanh network with one output; its last layer starts at 0, so that an untrained critic returns 0."""

    def __init__(self, in_features: int, hidden_size: int) -> None:
        super().__init__()
        last = nn.Linear(hidden_size, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_size), nn.Tanh(), nn.Linear(hidden_size, hidden_size), nn.Tanh(), last
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to values [...]."""
        return self.layers(x)[..., 0]
