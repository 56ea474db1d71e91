"""A small vision-language-action policy whose actions flow out of noise: flow matching, with log-probs for RL.

    tiny VLA's transformer --> hidden states [B, C, d] ---------------------------\
    chain x_0 (noise) --> x_1 --> ... --> x_K (the chunk), time t = k / K --expert--> velocity v(x, t) [B, C, A]

Cloning fits v to x_1 - x_0 on straight lines between noise x_0 and a demonstrated chunk x_1 (Lipman et al. 2023,
arXiv:2210.02747; pi0, arXiv:2410.24164).  Greedy actions follow dx = v dt from x = 0.  Sampled ones follow the
stochastic equation that has the same distribution at every t, with sigma = temperature sqrt(1 - t):

    dx = (v + sigma^2 / 2 score) dt + sigma dW          score = (t v - x) / (1 - t)

so that each of the K steps is a normal with a log-prob (Flow-GRPO, arXiv:2505.05470; pi-RL, arXiv:2510.25889).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from policies.tiny_vla import TinyVLA, TinyVLANet
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.policies import (
    Distribution,
    Evaluation,
    Features,
    Noise,
    PolicyOutput,
    PolicySpec,
    Record,
)
from rlinf_embodied.typed_options import typed

_FREQUENCIES = 8  # of the embedding of time: sine and cosine each


@dataclass(kw_only=True, slots=True)
class FlowOptions:
    """The section policy.options."""

    steps: int = 4  # K of a chain, in training and evaluation
    expert_size: int = 256  # units of the expert's hidden layers

    def __post_init__(self) -> None:
        for name in ("steps", "expert_size"):
            value = getattr(self, name)
            require(value >= 1, f"policy.options.{name}", value, "it must be at least 1", "leave it out")


class ActionExpert(nn.Module):
    """The velocity of a chunk: a residual network on the chunk, the time, and the hidden states of its actions."""

    frequencies: Tensor

    def __init__(self, chunk: int, action_dim: int, hidden_size: int, width: int) -> None:
        """Takes C, A, the width d of the hidden states, and that of its own layers."""
        super().__init__()
        size = chunk * action_dim
        self.enter = nn.Linear(size + chunk * hidden_size + 2 * _FREQUENCIES, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)])
        self.leave = nn.Linear(width, size)
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(_FREQUENCIES).float() / 4, persistent=False)

    def forward(self, hidden: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Returns v [B, C, A] of hidden states [B, C, d], chunks x [B, C, A] and times [B] in [0, 1]."""
        angles = time[:, None] * self.frequencies
        told = torch.cat([x.flatten(1), hidden.flatten(1), angles.sin(), angles.cos()], dim=1)
        y = self.enter(told)
        for layer in self.layers:
            y = y + layer(nn.functional.gelu(y))
        return self.leave(nn.functional.gelu(y)).view_as(x)


class FlowVLANet(TinyVLANet):
    """The tiny VLA's network with an expert in the place of its head."""

    def __init__(self, config: PolicyConfig, env: EnvSpec) -> None:
        """Builds the modules for an env's cameras, proprioception and chunk."""
        super().__init__(config, env)
        options = typed(config.options, FlowOptions, "policy.options")
        self.head = ActionExpert(env.chunk, env.action_dim, config.hidden_size, options.expert_size)


class FlowVLA(TinyVLA):
    """Records: "chain" float32 [B, K + 1, C, A]; policy.temperature is the size of the noise of a step."""

    _net = FlowVLANet
    options_type = FlowOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """See TinyVLA."""
        super().__init__(config, env, seed)
        self._steps = typed(config.options, FlowOptions, "policy.options").steps
        chunk = (env.chunk, env.action_dim)
        noise = Noise((self._steps + 1, *chunk), Distribution.normal)
        self.spec = PolicySpec(config.name, *chunk, choices=self._steps, noise=noise)
        self.imitation_noise = Noise((env.chunk * env.action_dim + 1,), Distribution.normal)

    # ------------------------------------------------------------------------------------------------------ inference
    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Follows the chain from `noise` [B, K + 1, C, A], of which the first is x_0; None: from 0, without noise."""
        hidden = self._hidden(features)
        rows, chunk = len(hidden), (self.spec.chunk, self.spec.action_dim)
        drawn = hidden.new_zeros(rows, self._steps + 1, *chunk) if noise is None else noise
        chain, log_probs = [drawn[:, 0]], []
        for k in range(self._steps):
            step = self._step(hidden, chain[-1], k, temperature if noise is not None else 0.0)
            chain.append(step.mean + step.std * drawn[:, k + 1])
            log_probs.append(step.log_prob(chain[-1]) if noise is not None else hidden.new_zeros(rows, chunk[0]))
        record = {"chain": torch.stack(chain, 1)}
        return PolicyOutput(chain[-1].clamp(-1.0, 1.0), record, torch.stack(log_probs, -1))

    def _step(self, hidden: Tensor, x: Tensor, k: int, level: float) -> _Step:
        """Returns how x_{k + 1} is distributed, given x_k [B, C, A]."""
        time, dt = k / self._steps, 1.0 / self._steps
        velocity = self.module.head(hidden, x, torch.full((len(x),), time, device=x.device))
        drift = velocity + 0.5 * level**2 * (time * velocity - x)
        return _Step(x + drift * dt, level * math.sqrt((1.0 - time) * dt))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs [B, C, K] of the steps of a "chain"; the size of its noise is given, so no entropy is."""
        hidden, chain = self._hidden(features), record["chain"].unbind(1)
        steps = [self._step(hidden, chain[k], k, temperature) for k in range(self._steps)]
        found = [step.log_prob(after) for step, after in zip(steps, chain[1:], strict=True)]
        return Evaluation(torch.stack(found, -1))

    # ------------------------------------------------------------------------------------------------------- training
    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed flow-matching loss over the B rows (scalar): |v - (x_1 - x_0)|^2, a mean over C * A.

        Args:
            features: as of TinyVLA.
            actions: x_1, float32 [B, C, A] in [-1, 1].
            targets: helper targets as of TinyVLA, and "noise" [B, C * A + 1]: x_0, and what decides t in [0, 1].
        """
        pooled = self._pool(features)
        hidden = self.module.hidden(pooled, features["proprio"], features["tokens"])
        start = targets["noise"][:, :-1].view_as(actions)
        time = Normal(0.0, 1.0).cdf(targets["noise"][:, -1])
        x = torch.lerp(start, actions, time[:, None, None])
        error = self.module.head(hidden, x, time) - (actions - start)
        return error.square().mean((1, 2)).sum() + self._helper_loss(pooled, targets)


@dataclass(frozen=True, slots=True)
class _Step:
    mean: Tensor  # [B, C, A]
    std: float

    def log_prob(self, x: Tensor) -> Tensor:
        """Returns log p [B, C] of each action of a chunk."""
        return Normal(self.mean, self.std).log_prob(x).sum(-1)
