"""Normalisation of state and actions by statistics of a dataset, as LeRobot's processors compute it.

    mode         normalised                             needs
    MEAN_STD     (x - mean) / (std + eps)               mean, std      (its inverse, x std + mean, has no eps)
    MIN_MAX      2 (x - min) / (max - min) - 1          min, max
    QUANTILES    2 (x - q01) / (q99 - q01) - 1          q01, q99
    QUANTILE10   2 (x - q10) / (q90 - q10) - 1          q10, q90
    IDENTITY     x

A range of exactly 0 is replaced by eps in both directions, and nothing is clipped.  Without statistics values are not
changed, as in the published base models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlinf_embodied.config import NormMode
from rlinf_embodied.errors import DataError

_NEEDED = {
    NormMode.mean_std: ("mean", "std"),
    NormMode.min_max: ("min", "max"),
    NormMode.quantiles: ("q01", "q99"),
    NormMode.quantile10: ("q10", "q90"),
    NormMode.identity: (),
}


@dataclass(frozen=True, slots=True)
class Normalisation:
    """How one feature is normalised."""

    name: str  # of the feature, for example "observation.state"
    mode: NormMode
    statistics: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [D] by kind: mean, std, min, max, q01, ...
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Raises DataError if the statistics lack what the mode needs, or their sizes differ."""
        needed = _NEEDED[self.mode] if self.statistics else ()
        missing = [kind for kind in needed if kind not in self.statistics]
        if missing:
            raise DataError(
                f"{self.name} is normalised by {self.mode.value}, but its statistics have no {', '.join(missing)}: "
                "recompute the dataset's statistics, or use another mode"
            )
        shapes = {tuple(self.statistics[kind].shape) for kind in needed}
        if len(shapes) > 1:
            raise DataError(f"{self.name}: its statistics have the shapes {sorted(shapes)}, but they must be equal")

    @property
    def size(self) -> int | None:
        """D; None if the feature is not normalised."""
        needed = _NEEDED[self.mode] if self.statistics else ()
        return self.statistics[needed[0]].numel() if needed else None

    def _pair(self, device: torch.device) -> tuple[Tensor, Tensor]:
        low, high = (self.statistics[kind].to(device) for kind in _NEEDED[self.mode])
        return low, high

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [..., D] normalised."""
        if self.size is None:
            return x
        low, high = self._pair(x.device)
        if self.mode is NormMode.mean_std:
            return (x - low) / (high + self.eps)
        return 2 * (x - low) / self._range(low, high) - 1

    def inverse(self, x: Tensor) -> Tensor:
        """Returns normalised values [..., D] in the units of the data."""
        if self.size is None:
            return x
        low, high = self._pair(x.device)
        if self.mode is NormMode.mean_std:
            return x * high + low
        return (x + 1) / 2 * self._range(low, high) + low

    def _range(self, low: Tensor, high: Tensor) -> Tensor:
        width = high - low
        return torch.where(width == 0, torch.full_like(width, self.eps), width)
