"""Flow matching for chunks of actions: integration of a velocity, log-probs of stochastic steps, and the loss.

    chain x_0 (noise) --> x_1 --> ... --> x_K (the chunk), time t = k / K, velocity v(x, t) [B, C, D]

Cloning fits v to x_1 - x_0 on straight lines between noise x_0 and a demonstrated chunk x_1 (Lipman et al. 2023,
arXiv:2210.02747; pi0, arXiv:2410.24164).  Evaluation follows dx = v dt from x_0 ~ N(0, I).  For RL, steps are samples
of normal distributions, which have log-probs, in one of two ways (pi_RL, arXiv:2510.25889).  Flow-SDE (also in
Flow-GRPO, arXiv:2505.05470) follows the stochastic equation that has the same distribution at every t:

    dx = (v + sigma^2 / 2 score) dt + sigma dW          score = (t v - x) / (1 - t)

with sigma = temperature sqrt(1 - t), or as published temperature sqrt((1 - t) / t).  Flow-noise (pi_RL) adds noise to
dx = v dt; its standard deviation is temperature times the output of a learned head, bounded by `noise_range`.

Each element of a chunk has separate noise.  Dimensions and actions of a network's chunk that the env does not execute
follow dx = v dt, so that the log-probs of the others are those of the whole chain.  With `one_step`, likewise, only one
step of a chain, drawn for each row, is stochastic and scored (pi_RL's default).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import (
    Distribution,
    Evaluation,
    Features,
    Noise,
    PolicyOutput,
    PolicySpec,
    Record,
)

# (chunks x [B, C, D], times [B] in [0, 1]) -> velocities v [B, C, D], and the learned standard deviations [B, C, D] of
# flow-noise (None: other noise)
Field = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
# (x, times) -> the expert's hidden states, and the velocities v computed from them
Expert = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Stochastic(StrEnum):
    """Which steps of a chain are stochastic and scored in RL."""

    one = "one"  # drawn for each chunk: an update needs one pass of the expert
    all = "all"


class StepNoise(StrEnum):
    """The noise of a stochastic step."""

    decaying = "decaying"  # flow-SDE, sigma = temperature sqrt(1 - t)
    flow_sde = "flow_sde"  # flow-SDE as published, sigma = temperature sqrt((1 - t) / t), at t = 0 temperature sqrt(K)
    flow_noise = "flow_noise"  # learned


@dataclass(kw_only=True)
class FlowSettings:
    """Fields of policy.options that all flow policies have."""

    steps: int = 0  # K of a chain, in training and evaluation
    stochastic_steps: Stochastic = Stochastic.one
    noise: StepNoise = StepNoise.decaying
    max_guidance: float = 10.0  # of real-time chunking; limited to `steps`
    noise_range: list[float] = field(default_factory=lambda: [0.08, 0.16])  # of flow_noise, at temperature 1: pi_RL's

    def require_valid(self) -> None:
        """Raises ConfigError if a number is out of range."""
        require_numbers(self, "policy.options", "steps", "max_guidance", low=0)
        bounds = self.noise_range
        ordered = len(bounds) == 2 and 0 < bounds[0] < bounds[1]
        rule = "it is the smallest and the largest standard deviation, above 0"
        require(ordered, "policy.options.noise_range", bounds, rule, "use [0.08,0.16]")


_PENDING = "pending."  # prefix of the features of the previous chunk, which overlaps with the new one
OF_USE = ("stochastic_steps", "noise", "noise_range", "max_guidance")  # options that a training may change


@dataclass(frozen=True, slots=True)
class Flow:
    """Chains of K `steps`; their record is "chain" float32 [B, K + 1, C, D].

    With `one_step` the record is the index of the stochastic step, "step" int64 [B], and x before and after it, "chain"
    [B, 2, C, D].
    """

    chunk: int  # C
    action_dim: int  # A
    steps: int  # K
    width: int = 0  # D, dimensions of a chain, of which the first A count; 0: A
    executed: int = 0  # the first actions of a chunk count; 0: C
    one_step: bool = False
    noise: StepNoise = StepNoise.decaying

    @property
    def shape(self) -> tuple[int, int]:
        """(C, D)."""
        return self.chunk, self.width or self.action_dim

    def spec(self, name: str) -> PolicySpec:
        """Returns the spec of a policy with this flow; each stochastic step of a chain is a choice."""
        draws = (2 * math.prod(self.shape) + 1,) if self.one_step else (self.steps + 1, *self.shape)
        start = Noise((1, *self.shape), Distribution.normal)
        choices = 1 if self.one_step else self.steps
        return PolicySpec(name, self.chunk, self.action_dim, choices, Noise(draws, Distribution.normal), start)

    def imitation_noise(self, draws: int = 1) -> Noise:
        """Returns the noise for `draws` pairs of x_0 and t per row in imitation, see `parts_of`."""
        return Noise((draws * (math.prod(self.shape) + 1),), Distribution.normal)

    def parts_of(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Splits `imitation_noise` of B rows into x_0 [B * draws, C, D] and uniforms [B * draws], row by row."""
        noise = noise.reshape(-1, math.prod(self.shape) + 1)
        return noise[:, :-1].unflatten(1, self.shape), Normal(0.0, 1.0).cdf(noise[:, -1])

    def _noisy(self, delay: Tensor) -> Tensor:
        """Returns which elements are stochastic, bool [B, C, D]: those executed from position `delay` on."""
        chunk, width = self.shape
        since = torch.arange(chunk, device=delay.device) - delay[:, None]
        actions = (since >= 0) & (since < (self.executed or chunk))
        return actions[..., None] & (torch.arange(width, device=delay.device) < self.action_dim)

    def step(
        self, field: Field, x: Tensor, k: int | Tensor, level: float | Tensor, delay: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the mean [B, C, D] of x_{k + 1} and the standard deviation [B, C, D] of its stochastic elements.

        Args:
            field: velocities.
            x: x_k [B, C, D].
            k: index of the step, or one index per row, int64 [B].
            level: scale of the noise, or one per row, [B, 1, 1].
            delay: number of env steps after which a chunk arrives, int64 [B].
        """
        dt, at = 1.0 / self.steps, torch.as_tensor(k, device=x.device).expand(len(x)) / self.steps
        v, scale = field(x, at)
        time = at[:, None, None]
        if self.noise is StepNoise.flow_noise:
            assert scale is not None, "flow-noise without a head for it"
            return x + v * dt, level * scale
        square: Any = level**2  # sigma^2 / (1 - t)
        if self.noise is StepNoise.flow_sde:
            square = square / time.clamp(min=dt)
        drift = v + torch.where(self._noisy(delay), 0.5 * square * (time * v - x), 0.0)
        return x + drift * dt, (square * (1.0 - time) * dt).sqrt().expand_as(x)

    def _log_prob(self, mean: Tensor, std: Tensor, x: Tensor, delay: Tensor) -> Tensor:
        """Returns log p [B, C] of each action of a chunk, starting with the first executed one; 0 beyond them."""
        log_probs = Normal(mean, std, validate_args=False).log_prob(x)
        log_probs = torch.where(self._noisy(delay), log_probs, 0.0).sum(-1)
        positions = torch.arange(self.chunk, device=delay.device) + delay[:, None]
        return F.pad(log_probs, (0, self.chunk)).gather(1, positions)

    def act(self, field: Field, noise: Tensor | None, level: float, delay: Tensor) -> PolicyOutput:
        """Follows chains from `noise` [B, *spec.noise.shape], whose first elements are x_0; actions [B, C, D] are x_K.

        Without noise (x_0 = 0), or at level 0, chains follow dx = v dt and log-probs are 0.
        """
        size, rows = math.prod(self.shape), len(delay)
        drawn = torch.zeros(rows, size, device=delay.device) if noise is None else noise.flatten(1)
        start = drawn[:, :size].unflatten(1, self.shape)
        if noise is None or level == 0.0:
            return self._greedy(field, start)
        step = (Normal(0.0, 1.0).cdf(drawn[:, -1]) * self.steps).long().clamp(max=self.steps - 1)
        noisy, chain, scores = self._noisy(delay), [start], []
        for k in range(self.steps):
            place = size if self.one_step else size * (k + 1)
            step_noise = drawn[:, place : place + size].unflatten(1, self.shape)
            step_level = level * (step == k)[:, None, None] if self.one_step else level
            mean, std = self.step(field, chain[-1], k, step_level, delay)
            chain.append(mean + torch.where(noisy, std * step_noise, 0.0))
            scores.append(self._log_prob(mean, std, chain[-1], delay))
        x, log_probs = torch.stack(chain, 1), torch.stack(scores, -1)
        if not self.one_step:
            return PolicyOutput(chain[-1], {"chain": x}, log_probs)
        row = torch.arange(rows, device=delay.device)
        ends = x[row[:, None], torch.stack([step, step + 1], 1)]
        return PolicyOutput(chain[-1], {"step": step, "chain": ends}, log_probs[row, :, step][..., None])

    def _greedy(self, field: Field, start: Tensor) -> PolicyOutput:
        chain = [start]
        for k in range(self.steps):
            v, _ = field(chain[-1], start.new_full((len(start),), k / self.steps))
            chain.append(chain[-1] + v * (1.0 / self.steps))
        log_probs = start.new_zeros(*start.shape[:2], 1 if self.one_step else self.steps)
        return PolicyOutput(chain[-1], {"chain": torch.stack(chain, 1)}, log_probs)

    def evaluate(self, field: Field, record: Record, level: float, delay: Tensor) -> Evaluation:
        """Returns log-probs [B, C, choices] of a record."""
        x, indices = record["chain"].unbind(1), [record["step"]] if self.one_step else range(self.steps)
        steps = [self.step(field, x[i], k, level, delay) for i, k in enumerate(indices)]
        return Evaluation(torch.stack([self._log_prob(*step, x[i + 1], delay) for i, step in enumerate(steps)], -1))

    def matching_error(self, expert: Expert, start: Tensor, time: Tensor, chunk: Tensor) -> Tensor:
        """Returns v - (x_1 - x_0) [B, C, D] at x_t = (1 - t) x_0 + t x_1, for x_0, times [B] and chunks x_1."""
        x = torch.lerp(start, chunk, time.to(chunk.dtype)[:, None, None])
        return expert(x, time)[1] - (chunk - start)


def drawn_to(
    v: Tensor, x: Tensor, time: Tensor, previous: Tensor, weights: Tensor, max_guidance: float, through: bool = False
) -> Tensor:
    """Returns v [B, C, D] of chunks x at times [B] with the guidance of real-time chunking (arXiv:2506.07339).

    v + min(max_guidance, (r^2 + t^2) / (t r)) weights (previous - (x + r v)), r = 1 - t: pulls the predicted end of the
    chain towards the rest of the previous chunk, [B, C, D], by weights [B, C].  In the paper the pull is multiplied by
    the transposed derivative of that end by x, so that all of the chunk follows the actions that are pulled; in LeRobot
    it is not.  `through`: as in the paper; v is computed from x, which requires a gradient.
    """
    t = time.to(v.dtype)[:, None, None]
    rest = 1.0 - t
    gain = ((rest.square() + t.square()) / (t * rest)).clamp(max=max_guidance)  # infinite at t = 0
    end = x + rest * v
    pull = weights[..., None] * (previous - end)
    if through:
        (pull,) = torch.autograd.grad(end, x, pull.detach())
    return v + gain * pull


class NoiseHead(nn.Module):
    """The standard deviations of flow-noise from an expert's hidden states; initially the middle of their bounds."""

    def __init__(self, width: int, size: int, bounds: list[float]) -> None:
        """Takes the width of the hidden states, the number of outputs, and the bounds."""
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 128), nn.Linear(128, size)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self._low, self._high = map(math.log, bounds)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns standard deviations [..., size] of hidden states [..., width]."""
        share = (torch.tanh(self.leave(torch.tanh(self.enter(hidden))).float()) + 1.0) / 2.0
        return (self._low + (self._high - self._low) * share).exp()


class ActsByFlow:
    """Acting and scoring for policies whose network computes a velocity; comes first in a class's bases.

    Records: see Flow; policy.temperature is the scale of a step's noise.
    """

    has_entropy = False
    continues_chunks = True
    flow: Flow
    _max_guidance: float
    spec: PolicySpec
    imitation_noise: Noise | None
    module: Any  # with a NoiseHead `noise` for flow-noise

    def _flows(self, name: str, settings: FlowSettings, env: EnvSpec, steps: int = 0, width: int = 0) -> None:
        """Sets the flow for an env's chunks of `width` dimensions; `steps` applies if settings.steps is 0."""
        one = settings.stochastic_steps is Stochastic.one
        sizes = (env.chunk, env.action_dim, settings.steps or steps, width, env.executed)
        self.flow = flow = Flow(*sizes, one, settings.noise)
        self._max_guidance = min(settings.max_guidance, flow.steps)  # more would overshoot
        self.spec, self.imitation_noise = flow.spec(name), flow.imitation_noise()

    def _expert(self, features: Features) -> Expert:
        raise NotImplementedError

    def _field(self, features: Features, deterministic: bool = False) -> Field:
        """Returns the velocities for some features.

        Deterministic chains, as in greedy evaluations, are guided as in the paper.  Stochastic ones are guided without
        the network's derivative, as their log-probs would need second derivatives.
        """
        expert, head = self._expert(features), getattr(self.module, "noise", None)
        pending, weights = (features.get(_PENDING + name) for name in ("actions", "weights"))
        previous = None if pending is None else self._chunk(features, pending)
        limit = self._max_guidance

        def field(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
            hidden, v = expert(x, time)
            if previous is not None and weights is not None:
                v = drawn_to(v, x, time, previous, weights, limit)
            return v, None if head is None else head(hidden).view_as(v)

        def guided(x: Tensor, time: Tensor) -> tuple[Tensor, None]:
            assert previous is not None
            assert weights is not None
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                v = drawn_to(expert(x, time)[1], x, time, previous, weights, limit, through=True)
            return v.detach(), None

        return guided if deterministic and weights is not None and weights.any() else field

    def _chunk(self, features: Features, actions: Tensor) -> Tensor:
        """Returns the network's chunk [B, C, D] for actions [B, C, A]."""
        raise NotImplementedError

    def _actions(self, features: Features, x: Tensor) -> Tensor:
        """Returns the actions [B, C, A] in [-1, 1] of a network's chunk x [B, C, D]."""
        return x.clamp(-1.0, 1.0)

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Integrates a chain, see `Flow.act`; `temperature` is the scale of the noise."""
        field = self._field(features, deterministic=noise is None or temperature == 0.0)
        output = self.flow.act(field, noise, temperature, _delay(features))
        return replace(output, actions=self._actions(features, output.actions))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        return self.flow.evaluate(self._field(features), record, temperature, _delay(features))


def pending_features(observation: Observation) -> Features:
    """Returns the features of an observation's previous chunk; {} if chunks do not overlap."""
    return {_PENDING + name: value for name, value in observation.pending.items()}


def _delay(features: Features) -> Tensor:
    rows = len(features["proprio"])
    return features.get(_PENDING + "delay", torch.zeros(rows, dtype=torch.long, device=features["proprio"].device))
