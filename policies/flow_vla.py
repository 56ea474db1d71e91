"""A small vision-language-action policy that generates actions by flow matching, with log-probs for RL.

    tiny VLA's transformer --> hidden states [B, C, d] --\
    chunk x [B, C, A], time t [B] ----------------------expert--> velocity v(x, t) [B, C, A], which flow.py follows
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from policies.flow import OF_USE, ActsByFlow, Expert, FlowSettings, NoiseHead, StepNoise, pending_features
from policies.tiny_vla import TinyVLA, TinyVLANet, TinyVLAOptions
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require_numbers
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Features

_FREQUENCIES = 8  # of the time embedding, each with sine and cosine
_DRAWS = 8  # of noise and time, per demonstrated chunk in a batch: the expert is small beside the vision before it
_SHORTEST = 0.05  # of 1 - t, by which the velocity is divided


@dataclass(kw_only=True, slots=True)
class FlowOptions(TinyVLAOptions, FlowSettings):
    """The section policy.options; num_bins has no effect."""

    steps: int = 4
    expert_size: int = 256  # units of the expert's hidden layers

    def __post_init__(self) -> None:
        TinyVLAOptions.__post_init__(self)
        self.require_valid()
        require_numbers(self, "policy.options", "steps", "expert_size", low=1)


class ActionExpert(nn.Module):
    """The velocity of a chunk: a residual network on the chunk, the time, and the hidden states of its actions.

    The network predicts the end of the chain, which lies among few chunks, and not the velocity, from which the noise
    would have to be removed exactly: v = (end - x) / (1 - t) (arXiv:2511.13720).
    """

    frequencies: Tensor

    def __init__(self, chunk: int, action_dim: int, hidden_size: int, width: int) -> None:
        """Takes C, A, the width d of the hidden states, and the width of its layers."""
        super().__init__()
        size = chunk * action_dim
        self.enter = nn.Linear(size + chunk * hidden_size + 2 * _FREQUENCIES, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)])
        self.end = nn.Linear(width, size)
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(_FREQUENCIES).float() / 4, persistent=False)

    def forward(self, hidden: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Returns its last layer [B, width] and v [B, C, A] for hidden states [B, C, d], chunks x and times [B]."""
        angles = time[:, None] * self.frequencies
        inputs = torch.cat([x.flatten(1), hidden.flatten(1), angles.sin(), angles.cos()], dim=1)
        y = self.enter(inputs)
        for layer in self.layers:
            y = y + layer(nn.functional.gelu(y))
        last = nn.functional.gelu(y)
        return last, (self.end(last).view_as(x) - x) / (1.0 - time).clamp(min=_SHORTEST)[:, None, None]


class FlowVLANet(TinyVLANet):
    """The tiny VLA's network with an action expert instead of its head."""

    def __init__(self, options: FlowOptions, critic: Critic, env: EnvSpec) -> None:
        """Builds the modules for an env's cameras, proprioception and chunk."""
        super().__init__(options, critic, env)
        self.head = ActionExpert(env.chunk, env.action_dim, options.hidden_size, options.expert_size)
        if options.noise is StepNoise.flow_noise:
            self.noise = NoiseHead(options.expert_size, env.chunk * env.action_dim, options.noise_range)


class FlowVLA(ActsByFlow, TinyVLA):
    """The tiny VLA with an action expert."""

    _net = FlowVLANet
    options_type = FlowOptions
    options_of_use = (*TinyVLA.options_of_use, *OF_USE)

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        super().__init__(config, env, seed)
        self._flows(config.name, cast(FlowOptions, self.options), env)
        self.imitation_noise = self.flow.imitation_noise(_DRAWS)

    def encode(self, observation: Observation) -> Features:
        return super().encode(observation) | pending_features(observation)

    def _expert(self, features: Features) -> Expert:
        return partial(self.module.head, self._hidden(features))

    def _chunk(self, features: Features, actions: Tensor) -> Tensor:
        return self.network_actions(actions)

    def _actions(self, features: Features, x: Tensor) -> Tensor:
        return self.robot_actions(x) if self.normalisation else super()._actions(features, x)

    def _losses(self, hidden: Tensor, chunk: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        start, time = self.flow.parts_of(targets["noise"])
        hidden, chunk = (part.repeat_interleave(_DRAWS, 0) for part in (hidden, chunk))
        error = self.flow.matching_error(partial(self.module.head, hidden), start, time, chunk)
        return error.square().unflatten(0, (-1, _DRAWS)).mean(1)
