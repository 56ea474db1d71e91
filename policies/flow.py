"""How a chunk of actions flows out of noise, given a velocity: chains, their log-probs, and the loss that fits it.

    chain x_0 (noise) --> x_1 --> ... --> x_K (the chunk), time t = k / K, velocity v(x, t) [B, C, A]

Cloning fits v to x_1 - x_0 on straight lines between noise x_0 and a demonstrated chunk x_1 (Lipman et al. 2023,
arXiv:2210.02747; pi0, arXiv:2410.24164).  Greedy actions follow dx = v dt from x = 0.  Sampled ones follow the
stochastic equation that has the same distribution at every t, with sigma = temperature sqrt(1 - t):

    dx = (v + sigma^2 / 2 score) dt + sigma dW          score = (t v - x) / (1 - t)

so that each of the K steps is a normal with a log-prob (Flow-GRPO, arXiv:2505.05470; pi-RL, arXiv:2510.25889).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from rlinf_embodied.interfaces.policies import (
    Distribution,
    Evaluation,
    Features,
    Noise,
    PolicyOutput,
    PolicySpec,
    Record,
    mean_of_rows,
)

Velocity = Callable[[Tensor, Tensor], Tensor]  # v [B, C, A] of chunks x [B, C, A] and times [B] in [0, 1]


@dataclass(frozen=True, slots=True)
class FlowStep:
    """How x_{k + 1} is distributed."""

    mean: Tensor  # [B, C, A]
    std: float

    def log_prob(self, x: Tensor) -> Tensor:
        """Returns log p [B, C] of each action of a chunk."""
        return Normal(self.mean, self.std).log_prob(x).sum(-1)


@dataclass(frozen=True, slots=True)
class Flow:
    """Chains of K `steps`; their record is "chain" float32 [B, K + 1, C, A]."""

    chunk: int  # C
    action_dim: int  # A
    steps: int  # K

    def spec(self, name: str) -> PolicySpec:
        """Returns the facts about a policy that acts so: each step of a chain is a choice."""
        chunk = (self.chunk, self.action_dim)
        noise = Noise((self.steps + 1, *chunk), Distribution.normal)
        return PolicySpec(name, *chunk, choices=self.steps, noise=noise)

    def imitation_noise(self) -> Noise:
        """Returns what `matching_loss` is handed: x_0, and what decides t."""
        return Noise((self.chunk * self.action_dim + 1,), Distribution.normal)

    def step(self, velocity: Velocity, x: Tensor, k: int, level: float) -> FlowStep:
        """Returns how x_{k + 1} is distributed, given x_k [B, C, A]; `level` is the size of the noise."""
        time, dt = k / self.steps, 1.0 / self.steps
        v = velocity(x, torch.full((len(x),), time, device=x.device))
        drift = v + 0.5 * level**2 * (time * v - x)
        return FlowStep(x + drift * dt, level * math.sqrt((1.0 - time) * dt))

    def act(
        self, velocity: Velocity, rows: int, device: torch.device, noise: Tensor | None, level: float
    ) -> PolicyOutput:
        """Follows chains from `noise` [B, K + 1, C, A], of which the first is x_0; None: from 0, without noise."""
        chunk = (self.chunk, self.action_dim)
        drawn = torch.zeros(rows, self.steps + 1, *chunk, device=device) if noise is None else noise
        chain, log_probs = [drawn[:, 0]], []
        for k in range(self.steps):
            step = self.step(velocity, chain[-1], k, level if noise is not None else 0.0)
            chain.append(step.mean + step.std * drawn[:, k + 1])
            scored = step.log_prob(chain[-1]) if noise is not None else drawn.new_zeros(rows, self.chunk)
            log_probs.append(scored)
        record = {"chain": torch.stack(chain, 1)}
        return PolicyOutput(chain[-1].clamp(-1.0, 1.0), record, torch.stack(log_probs, -1))

    def evaluate(self, velocity: Velocity, chain: Tensor, level: float) -> Evaluation:
        """Returns log-probs [B, C, K] of a chain's steps; the size of the noise is given, so no entropy is."""
        x = chain.unbind(1)
        steps = [self.step(velocity, x[k], k, level) for k in range(self.steps)]
        found = [step.log_prob(after) for step, after in zip(steps, x[1:], strict=True)]
        return Evaluation(torch.stack(found, -1))

    def matching_loss(self, velocity: Velocity, targets: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """Returns |v - (x_1 - x_0)|^2 of each row [B], a mean over C * A, of which padding counts as 0.

        Args:
            velocity: to fit.
            targets: "noise" [B, C * A + 1]: x_0, and what decides t in [0, 1]; perhaps "action_is_pad" [B, C].
            actions: x_1, float32 [B, C, A] in [-1, 1].
        """
        noise = targets["noise"]
        start = noise[:, :-1].view_as(actions)
        time = Normal(0.0, 1.0).cdf(noise[:, -1])
        error = velocity(torch.lerp(start, actions, time[:, None, None]), time) - (actions - start)
        return mean_of_rows(error.square(), targets)


class ActsByFlow:
    """Acting, scoring and cloning of policies whose network gives a velocity: first in a class's bases.

    Records: "chain" float32 [B, K + 1, C, A]; policy.temperature is the size of the noise of a step.
    """

    has_entropy = False
    flow: Flow

    def _velocity(self, features: Features) -> Velocity:
        raise NotImplementedError

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Follows the chain from `noise` [B, K + 1, C, A], of which the first is x_0; None: from 0, without noise."""
        proprio = features["proprio"]
        return self.flow.act(self._velocity(features), len(proprio), proprio.device, noise, temperature)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        return self.flow.evaluate(self._velocity(features), record["chain"], temperature)

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed `matching_loss` of B rows (scalar)."""
        return self.flow.matching_loss(self._velocity(features), targets, actions).sum()
