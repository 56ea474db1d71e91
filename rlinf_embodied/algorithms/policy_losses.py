"""Policy losses as functions of importance ratios; docs/own_algorithm.md adds one.

Configs name them, so the module does not import torch (see compose/composition.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_embodied.config import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyEntries:
    """The inputs of a policy's loss, one entry per ratio; masked entries have ratio 1, and 0 in all other columns."""

    log_probs: Tensor  # float32 [*axes], log pi, with a gradient
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

    sequence_level = True


@dataclass(kw_only=True, slots=True)
class CISPO(PolicyLoss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: it clips no gradient (arXiv 2506.13585, eq. 4 and 5)."""

    regularizes = False

    def __call__(self, entries: PolicyEntries) -> Tensor:
        return -(entries.clipped_ratio.detach() * entries.advantages * entries.log_probs)
