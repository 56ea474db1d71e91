"""Policy losses as functions of importance ratios; docs/own_algorithm.md adds one.

Configs name them, so the module does not import torch (see compose/composition.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlinf_embodied.config import PolicyLoss, RatioLevel
from rlinf_embodied.config.checks import require_numbers
from rlinf_embodied.errors import ObjectiveError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_RATIO = 20.0  # of DPPO, as in verl


@dataclass(frozen=True, slots=True)
class PolicyEntries:
    """The inputs of a policy's loss, one entry per ratio; masked entries have ratio 1, and 0 in all other columns."""

    log_probs: Tensor  # float32 [*axes], log pi, with a gradient
    old_log_probs: Tensor  # [*axes], log pi_old
    ratio: Tensor  # [*axes], pi / pi_old, with a gradient
    advantages: Tensor  # [*axes]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    reference_log_probs: Tensor | None = None  # [*axes], under the initial policy, if the loss needs it

    @property
    def clipped_ratio(self) -> Tensor:
        return self.ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


@dataclass(kw_only=True, slots=True)
class Clipped(PolicyLoss):
    """PPO's loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    (PPO, arXiv 1707.06347, eq. 7; the two-sided range of DAPO, arXiv 2503.14476, eq. 10.)  With `dual_clip` the min is
    at least dual_clip A where A < 0 (Ye et al., arXiv 1912.09729, eq. 5), which bounds the loss of actions that have
    become much more likely.
    """

    regularizes = False
    takes_dual_clip = True

    def __call__(self, entries: PolicyEntries) -> Tensor:
        advantages, bound = entries.advantages, entries.dual_clip
        surrogate = (entries.ratio * advantages).minimum(entries.clipped_ratio * advantages)
        if bound is not None:
            surrogate = surrogate.maximum(bound * advantages).where(advantages < 0, surrogate)
        return -surrogate


@dataclass(kw_only=True, slots=True)
class GSPO(Clipped):
    """PPO's loss with one ratio per chunk or completion, the geometric mean over its choices (arXiv 2507.18071)."""

    level = RatioLevel.geometric


@dataclass(kw_only=True, slots=True)
class SequenceClipped(Clipped):
    """PPO's loss with one ratio per chunk or completion, the product over its choices.

    A completion is one action, as in RLOO (arXiv 2402.14740, section 3): at r = 1 the gradient is -A grad log pi of the
    whole completion.
    """

    level = RatioLevel.sequence


@dataclass(kw_only=True, slots=True)
class CISPO(PolicyLoss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: it clips no gradient (arXiv 2506.13585, eq. 4 and 5)."""

    regularizes = False

    def __call__(self, entries: PolicyEntries) -> Tensor:
        return -(entries.clipped_ratio.detach() * entries.advantages * entries.log_probs)


class Divergence(StrEnum):
    """How far p = pi(a) is from q = pi_old(a), where all other choices count as one."""

    tv = "tv"  # total variation, |p - q|
    kl = "kl"  # KL(pi_old || pi), q log(q / p) + (1 - q) log((1 - q) / (1 - p))


@dataclass(kw_only=True, slots=True)
class DPPO(PolicyLoss):
    """-m sg(min(r, 20)) A log pi; m is 0 if the divergence exceeds the threshold and A would increase it, otherwise 1.

    It bounds a divergence where PPO bounds the ratio, which restricts unlikely choices most ("Rethinking the Trust
    Region in LLM Reinforcement Learning", arXiv 2602.04879, section 4; binary variants, as verl's dppo_tv and dppo_kl).
    The paper's q is the sampler's probability.

    Raises:
        ObjectiveError: a log-prob is positive, as those of continuous choices can be.
    """

    regularizes = False

    divergence: Divergence = Divergence.tv
    threshold: float = 0.15  # the authors use 0.15 for tv, 0.05 for kl

    def __post_init__(self) -> None:
        require_numbers(self, "algorithm.loss", "threshold", above=True)

    def __call__(self, entries: PolicyEntries) -> Tensor:
        now, old, advantages = entries.log_probs.detach(), entries.old_log_probs, entries.advantages
        if (largest := float(now.max())) > 1e-3:
            raise ObjectiveError(
                f"algorithm.loss is DPPO, which compares probabilities of discrete choices, but a log-prob is "
                f"{largest:.3g}: a density; use algorithm.loss=clipped"
            )
        p, q = now.exp(), old.exp()
        divergence = (p - q).abs()
        if self.divergence is Divergence.kl:
            other = [(-x.clamp(max=1 - 1e-7)).log1p() for x in (q, p)]  # log of the probability of all other choices
            divergence = q * (old - now) + (1 - q) * (other[0] - other[1])
        inside = (divergence <= self.threshold) | ((p - q) * advantages <= 0)
        return -(inside * entries.ratio.detach().clamp(max=_LARGEST_RATIO) * advantages * entries.log_probs)
