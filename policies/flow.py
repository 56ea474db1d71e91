"""How a chunk of actions flows out of noise, given a velocity: chains, their log-probs, and the loss that fits it.

    chain x_0 (noise) --> x_1 --> ... --> x_K (the chunk), time t = k / K, velocity v(x, t) [B, C, A]

Cloning fits v to x_1 - x_0 on straight lines between noise x_0 and a demonstrated chunk x_1 (Lipman et al. 2023,
arXiv:2210.02747; pi0, arXiv:2410.24164).  Greedy actions follow dx = v dt from x = 0.  Sampled ones follow the
stochastic equation that has the same distribution at every t, with sigma = temperature sqrt(1 - t):

    dx = (v + sigma^2 / 2 score) dt + sigma dW          score = (t v - x) / (1 - t)

so that each of the K steps is a normal with a log-prob (Flow-GRPO, arXiv:2505.05470; pi-RL, arXiv:2510.25889).

The equation holds for each number of a chunk by itself: where a network's chunk has further dimensions or actions than
the env executes, these follow dx = v dt, so that the log-probs of the others are those of the whole chain.  With
`one_step` the same is true of steps: one of a chain, drawn for each row, is stochastic and scored (pi-RL's default).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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

    mean: Tensor  # [B, C, D]
    std: float | Tensor  # of the noisy part; [B, 1, 1] where rows differ

    def log_prob(self, x: Tensor, noisy: tuple[int, int] | None = None) -> Tensor:
        """Returns log p [B, C] of each action of a chunk; only (actions, dimensions) of it may be `noisy`."""
        found = Normal(self.mean, self.std, validate_args=False).log_prob(x)
        if noisy is None:
            return found.sum(-1)
        actions, dimensions = noisy
        return torch.nn.functional.pad(found[:, :actions, :dimensions].sum(-1), (0, x.shape[1] - actions))


@dataclass(frozen=True, slots=True)
class Flow:
    """Chains of K `steps`; their record is "chain" float32 [B, K + 1, C, D].

    With `one_step` it is the stochastic step: "step" int64 [B], and "chain" [B, 2, C, D], what is before and after it.
    """

    chunk: int  # C
    action_dim: int  # A
    steps: int  # K
    width: int = 0  # D, dimensions of a chain, of which the first A count; 0: A
    executed: int = 0  # the first actions of a chunk count; 0: C
    one_step: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(C, D)."""
        return self.chunk, self.width or self.action_dim

    @property
    def noisy(self) -> tuple[int, int] | None:
        """How many actions and dimensions of a chunk are stochastic; None: all."""
        part = (self.executed or self.chunk, self.action_dim)
        return None if part == self.shape else part

    def spec(self, name: str) -> PolicySpec:
        """Returns the facts about a policy that acts so: each stochastic step of a chain is a choice."""
        size = math.prod(self.shape)
        shape = (2 * size + 1,) if self.one_step else (self.steps + 1, *self.shape)
        choices, noise = 1 if self.one_step else self.steps, Noise(shape, Distribution.normal)
        return PolicySpec(name, self.chunk, self.action_dim, choices, noise)

    def imitation_noise(self) -> Noise:
        """Returns what `matching_loss` is handed: x_0, and what decides t."""
        return Noise((math.prod(self.shape) + 1,), Distribution.normal)

    def _part(self, x: Tensor) -> Tensor:
        """Returns x [B, C, D] with zeros where nothing is stochastic."""
        if self.noisy is None:
            return x
        (actions, dimensions), (chunk, width) = self.noisy, self.shape
        return torch.nn.functional.pad(x[:, :actions, :dimensions], (0, width - dimensions, 0, chunk - actions))

    def step(self, velocity: Velocity, x: Tensor, k: int | Tensor, level: float | Tensor) -> FlowStep:
        """Returns how x_{k + 1} is distributed, given x_k [B, C, D].

        Args:
            velocity: of chunks and times.
            x: x_k.
            k: the number of the step, or those of the rows, int64 [B].
            level: the size of the noise, or those of the rows [B, 1, 1].
        """
        dt = 1.0 / self.steps
        if isinstance(k, int):
            time: Any = k / self.steps
            v, root = velocity(x, torch.full((len(x),), time, device=x.device)), math.sqrt((1.0 - time) * dt)
        else:
            time = (k / self.steps)[:, None, None]
            v, root = velocity(x, k / self.steps), ((1.0 - time) * dt).sqrt()
        drift = v + self._part(0.5 * level**2 * (time * v - x))
        return FlowStep(x + drift * dt, level * root)

    def act(
        self, velocity: Velocity, rows: int, device: torch.device, noise: Tensor | None, level: float
    ) -> PolicyOutput:
        """Follows chains from `noise` [B, *spec.noise.shape], whose first numbers are x_0; actions [B, C, D] are x_K.

        Without noise, or at level 0, chains follow dx = v dt, from 0 or from x_0; they have no log-probs.
        """
        if noise is None:
            return self._greedy(velocity, torch.zeros(rows, *self.shape, device=device))
        size = math.prod(self.shape)
        start = noise.flatten(1)[:, :size].unflatten(1, self.shape)
        if level == 0.0:
            return self._greedy(velocity, start)
        if self.one_step:
            chosen = (Normal(0.0, 1.0).cdf(noise[:, -1]) * self.steps).long().clamp(max=self.steps - 1)
            return self._act_in_one(velocity, start, noise[:, size:-1].unflatten(1, self.shape), chosen, level)
        chain, log_probs = [start], []
        for k in range(self.steps):
            step = self.step(velocity, chain[-1], k, level)
            chain.append(step.mean + step.std * self._part(noise[:, k + 1]))
            log_probs.append(step.log_prob(chain[-1], self.noisy))
        return PolicyOutput(chain[-1], {"chain": torch.stack(chain, 1)}, torch.stack(log_probs, -1))

    def _greedy(self, velocity: Velocity, start: Tensor) -> PolicyOutput:
        chain = [start]
        for k in range(self.steps):
            chain.append(self.step(velocity, chain[-1], k, 0.0).mean)
        nothing = start.new_zeros(*start.shape[:2], 1 if self.one_step else self.steps)
        return PolicyOutput(chain[-1], {"chain": torch.stack(chain, 1)}, nothing)

    def _act_in_one(self, velocity: Velocity, x: Tensor, drawn: Tensor, chosen: Tensor, level: float) -> PolicyOutput:
        before, after, log_probs = x, x, x.new_zeros(x.shape[:2])
        for k in range(self.steps):
            here = (chosen == k)[:, None, None]
            step = self.step(velocity, x, k, level * here)
            moved = step.mean + step.std * self._part(drawn)
            before, after = torch.where(here, x, before), torch.where(here, moved, after)
            log_probs = torch.where(here[:, 0], step.log_prob(moved, self.noisy), log_probs)
            x = moved
        return PolicyOutput(x, {"step": chosen, "chain": torch.stack([before, after], 1)}, log_probs[..., None])

    def evaluate(self, velocity: Velocity, record: Record, level: float) -> Evaluation:
        """Returns log-probs [B, C, choices] of a record; the size of the noise is given, so no entropy is."""
        x = record["chain"].unbind(1)
        if self.one_step:
            step = self.step(velocity, x[0], record["step"], level)
            return Evaluation(step.log_prob(x[1], self.noisy)[..., None])
        steps = [self.step(velocity, x[k], k, level) for k in range(self.steps)]
        found = [step.log_prob(after, self.noisy) for step, after in zip(steps, x[1:], strict=True)]
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

    def _actions(self, features: Features, x: Tensor) -> Tensor:
        """Returns the actions [B, C, A] in [-1, 1] that a chunk x [B, C, D] means."""
        return x.clamp(-1.0, 1.0)

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Follows a chain, see `Flow.act`; `temperature` is the size of the noise."""
        proprio = features["proprio"]
        output = self.flow.act(self._velocity(features), len(proprio), proprio.device, noise, temperature)
        return replace(output, actions=self._actions(features, output.actions))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        return self.flow.evaluate(self._velocity(features), record, temperature)

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed `matching_loss` of B rows (scalar)."""
        return self.flow.matching_loss(self._velocity(features), targets, actions).sum()
