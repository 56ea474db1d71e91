"""Distributions of continuous and categorical actions: drawn by given noise, scored from a record.

Axes: B rows, C actions per chunk, A entries of an action, K choices of an action that have a log-prob each.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_embodied.algorithms.log_probs import greedy_tokens, sample_tokens, token_log_probs_and_entropy
from rlinf_embodied.interfaces.policies import Distribution, Noise

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class ActionDistribution(Protocol):
    """How the outputs of a network, [B, C, A], become actions; `log_std` is [C, A], or None without deviations."""

    has_std: bool

    def noise(self, chunk: int, dim: int) -> Noise:
        """Returns what it is drawn with."""
        ...

    def choices(self, dim: int) -> int: ...

    def draw(self, out: Tensor, log_std: Tensor | None, noise: Tensor | None, temperature: float) -> Tensor:
        """Returns what is recorded of the choice; without noise the greedy one."""
        ...

    def actions(self, drawn: Tensor, dim: int) -> Tensor:
        """Returns the actions [B, C, A] in [-1, 1] of a record."""
        ...

    def scored(
        self, out: Tensor, log_std: Tensor | None, drawn: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs [B, C, K] of a record, and their entropy, None where it has no closed form."""
        ...


class Gaussian:
    """A normal of mean `out` and deviation exp(log_std) temperature; the env's bounds clip it, not the density."""

    has_std = True

    def noise(self, chunk: int, dim: int) -> Noise:
        return Noise((chunk, dim), Distribution.normal)

    def choices(self, dim: int) -> int:
        return dim

    def draw(self, out: Tensor, log_std: Tensor | None, noise: Tensor | None, temperature: float) -> Tensor:
        assert log_std is not None
        return out if noise is None else out + noise * (log_std.exp() * temperature)

    def actions(self, drawn: Tensor, dim: int) -> Tensor:
        return drawn.clamp(-1.0, 1.0)

    def scored(
        self, out: Tensor, log_std: Tensor | None, drawn: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log N(u; m, s) = -((u - m) / s)^2 / 2 - log s - log(2 pi) / 2, and 1/2 + log(2 pi) / 2 + log s."""
        assert log_std is not None
        log_scale = log_std + math.log(temperature)
        log_probs = -0.5 * ((drawn - out) / log_scale.exp()).square() - log_scale - _HALF_LOG_2PI
        log_scale = log_scale if entropy_gradient else log_scale.detach()
        return log_probs, (0.5 + _HALF_LOG_2PI + log_scale).expand_as(log_probs)


class SquashedGaussian(Gaussian):
    """The tanh of a normal (SAC, arXiv:1801.01290, appendix C); it has no entropy in closed form."""

    def actions(self, drawn: Tensor, dim: int) -> Tensor:
        return drawn.tanh()

    def scored(
        self, out: Tensor, log_std: Tensor | None, drawn: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log N(u; m, s) - log(1 - tanh(u)^2)."""
        log_probs, _ = super().scored(out, log_std, drawn, temperature)
        return log_probs - _log_slope(drawn), None

    def reparameterized(self, out: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions tanh(u) and their log-probs, of u = out + noise exp(log_std), with the gradients of both.

        All are [B, C, A].  The density is that of the noise over the slopes: nothing is lost where deviations are so
        small that u - out is rounded.
        """
        drawn = out + noise * log_std.exp()
        log_probs = -0.5 * noise.square() - log_std - _HALF_LOG_2PI - _log_slope(drawn)
        return drawn.tanh(), log_probs


def _log_slope(drawn: Tensor) -> Tensor:
    """Returns log(1 - tanh(u)^2), as 2 (log 2 - u - softplus(-2 u)), which no large u rounds to log 0."""
    return 2.0 * (math.log(2.0) - drawn - functional.softplus(-2.0 * drawn))


class Categorical:
    """One of A by its logits `out`; the action is 1 there and -1 elsewhere."""

    has_std = False

    def noise(self, chunk: int, dim: int) -> Noise:
        return Noise((chunk,))

    def choices(self, dim: int) -> int:
        return 1

    def draw(self, out: Tensor, log_std: Tensor | None, noise: Tensor | None, temperature: float) -> Tensor:
        return greedy_tokens(out) if noise is None else sample_tokens(out, noise, temperature)

    def actions(self, drawn: Tensor, dim: int) -> Tensor:
        return functional.one_hot(drawn, dim).to(torch.float32) * 2.0 - 1.0

    def scored(
        self, out: Tensor, log_std: Tensor | None, drawn: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log p of what was chosen, and -sum p log p."""
        found, entropy = token_log_probs_and_entropy(out, drawn, temperature, entropy_gradient)
        return found[..., None], entropy[..., None]


DISTRIBUTIONS: dict[str, type[ActionDistribution]] = {
    "gaussian": Gaussian,
    "squashed_gaussian": SquashedGaussian,
    "categorical": Categorical,
}
