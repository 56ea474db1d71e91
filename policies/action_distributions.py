"""Distributions of continuous and categorical actions: sampled with given noise, scored from a record.

Axes: B rows, C actions per chunk, A entries of an action, K log-probs per action.  The
outputs `out` of a network are [B, C, A], and the logarithms of standard deviations `log_std` are [C, A] or [B, C, A].
"""

from __future__ import annotations

import math

from torch import Tensor, float32
from torch.nn import functional

from rlinf_embodied.algorithms.log_probs import sample_tokens, token_log_probs_and_entropy
from rlinf_embodied.interfaces.policies import Distribution, Noise

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Gaussian:
    """A normal with mean `out` and standard deviation exp(log_std) temperature; its density ignores clipping."""

    has_std = True

    def __init__(self, chunk: int, dim: int) -> None:
        """Takes C and A."""
        self.noise, self.choices = Noise((chunk, dim), Distribution.normal), dim

    def draw(self, out: Tensor, log_std: Tensor | None, noise: Tensor | None, temperature: float) -> Tensor:
        """Returns the sample to record; the mode if there is no noise."""
        assert log_std is not None
        return out if noise is None else out + noise * (log_std.exp() * temperature)

    def actions(self, drawn: Tensor) -> Tensor:
        """Returns the actions [B, C, A] in [-1, 1] of a recorded sample."""
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

    def actions(self, drawn: Tensor) -> Tensor:
        return drawn.tanh()

    def scored(
        self, out: Tensor, log_std: Tensor | None, drawn: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log N(u; m, s) - log(1 - tanh(u)^2)."""
        log_probs, _ = super().scored(out, log_std, drawn, temperature)
        return log_probs - _log_slope(drawn), None

    def reparameterized(self, out: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns differentiable actions tanh(u), u = out + noise exp(log_std), and their log-probs, both [B, C, A].

        Log-probs are computed from the noise, not from u - out, which rounds to 0 for small standard deviations.
        """
        drawn = out + noise * log_std.exp()
        log_probs = -0.5 * noise.square() - log_std - _HALF_LOG_2PI - _log_slope(drawn)
        return drawn.tanh(), log_probs


def _log_slope(drawn: Tensor) -> Tensor:
    """Returns log(1 - tanh(u)^2), as 2 (log 2 - u - softplus(-2 u)), which stays finite for large u."""
    return 2.0 * (math.log(2.0) - drawn - functional.softplus(-2.0 * drawn))


class Categorical:
    """One of A choices with logits `out`; the action is 1 at the choice and -1 elsewhere.  Methods as in Gaussian."""

    has_std = False

    def __init__(self, chunk: int, dim: int) -> None:
        """Takes C and A."""
        self.noise, self.choices, self._dim = Noise((chunk,)), 1, dim

    def draw(self, out: Tensor, log_std: Tensor | None, noise: Tensor | None, temperature: float) -> Tensor:
        return out.argmax(-1) if noise is None else sample_tokens(out, noise, temperature)

    def actions(self, drawn: Tensor) -> Tensor:
        return functional.one_hot(drawn, self._dim).to(float32) * 2.0 - 1.0

    def scored(
        self, out: Tensor, log_std: Tensor | None, drawn: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log p of the choice, and the entropy -sum p log p."""
        log_probs, entropy = token_log_probs_and_entropy(out, drawn, temperature, entropy_gradient)
        return log_probs[..., None], entropy[..., None]


DISTRIBUTIONS = {"gaussian": Gaussian, "squashed_gaussian": SquashedGaussian, "categorical": Categorical}
