"""Actions relative to the state in which they were predicted, as in LeRobot's processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeActions:
    """Whether actions are relative to the state, and for which joints."""

    enabled: bool = False
    exclude_joints: tuple[str, ...] = ("gripper",)  # substrings of names, ignoring case
    action_names: tuple[str, ...] | None = None  # None: no joint is excluded

    @classmethod
    def of(cls, enabled: bool, exclude_joints: Sequence[str] | None, names: Sequence[str] | None) -> RelativeActions:
        """Returns the settings from the fields of a file."""
        joints = tuple(exclude_joints or ())
        return cls(enabled=enabled, exclude_joints=joints, action_names=None if names is None else tuple(names))

    def offset(self, state: Tensor, dim: int) -> Tensor:
        """Returns the offset [B, 1, dim] that makes relative actions [B, C, dim] of a state [B, D] absolute."""
        masked = [True] * dim
        if self.exclude_joints and self.action_names is not None:
            words = [word.lower() for word in self.exclude_joints if word]
            masked = [not any(word in name.lower() for word in words) for name in self.action_names]
        mask = torch.tensor(masked[:dim], dtype=state.dtype, device=state.device)
        length = min(len(mask), state.shape[1])
        return F.pad(state[:, :length] * mask[:length], (0, dim - length))[:, None]
