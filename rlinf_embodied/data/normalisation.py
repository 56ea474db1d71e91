"""How policies normalise states and actions: the formulas and constants of LeRobot, both ways.

    mean_std     (x - mean) / (std + 1e-8)                           x = y std + mean
    min_max      2 (x - min) / (max - min) - 1                       x = (y + 1) / 2 (max - min) + min
    quantiles    the same between q01 and q99; quantile10 between q10 and q90
    identity     x

A range of exactly 0 counts as 1e-8, and nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor

_EPSILON = 1e-8


class Normalisation(StrEnum):
    """A mode; LeRobot writes it in capitals."""

    identity = "identity"
    mean_std = "mean_std"
    min_max = "min_max"
    quantiles = "quantiles"
    quantile10 = "quantile10"


_BOUNDS = {
    Normalisation.min_max: ("min", "max"),
    Normalisation.quantiles: ("q01", "q99"),
    Normalisation.quantile10: ("q10", "q90"),
}


def needed_statistics(mode: Normalisation) -> tuple[str, ...]:
    """Returns the names of the statistics that a mode reads."""
    return ("mean", "std") if mode is Normalisation.mean_std else _BOUNDS.get(mode, ())


def normalise(values: Tensor, mode: Normalisation, statistics: Mapping[str, Tensor]) -> Tensor:
    """Returns values [..., D] in the network's units; statistics are [D] each."""
    if mode is Normalisation.identity:
        return values
    if mode is Normalisation.mean_std:
        return (values - statistics["mean"]) / (statistics["std"] + _EPSILON)
    low, size = _range(mode, statistics)
    return 2.0 * (values - low) / size - 1.0


def unnormalise(values: Tensor, mode: Normalisation, statistics: Mapping[str, Tensor]) -> Tensor:
    """Returns values [..., D] in the dataset's units: the inverse of `normalise`."""
    if mode is Normalisation.identity:
        return values
    if mode is Normalisation.mean_std:
        return values * statistics["std"] + statistics["mean"]
    low, size = _range(mode, statistics)
    return (values + 1.0) / 2.0 * size + low


def _range(mode: Normalisation, statistics: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    low, high = (statistics[name] for name in _BOUNDS[mode])
    size = high - low
    return low, torch.where(size == 0, torch.full_like(size, _EPSILON), size)
