"""Action and proprioception statistics of the data sets that a checkpoint was trained on, and scaling by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlinf_embodied.errors import CheckpointError, ConfigError

OFT_EPSILON = 1e-8  # OFT adds it to the width of a range, OpenVLA does not


class Scaling(StrEnum):
    """What -1 and 1 stand for: the 1st and 99th percentile, or minimum and maximum (ALOHA)."""

    quantiles = "quantiles"
    bounds = "bounds"


_KEYS = {Scaling.quantiles: ("q01", "q99"), Scaling.bounds: ("min", "max")}


@dataclass(frozen=True, slots=True)
class Range:
    """The range of every dimension, float64 [A]; `mask` [A] is false where values are left as they are."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mask: NDArray[np.bool_]

    @property
    def dim(self) -> int:
        """The number of dimensions A."""
        return len(self.low)

    def expand(self, values: ArrayLike, epsilon: float = 0.0) -> NDArray[np.float64]:
        """Returns values of the robot for normalised ones [..., A]: low + (a + 1) / 2 * (high - low + epsilon).

        Raises:
            ConfigError: the last axis is not A long.
        """
        given = self._checked(values)
        return np.where(self.mask, 0.5 * (given + 1.0) * (self.high - self.low + epsilon) + self.low, given)

    def normalise(self, values: ArrayLike) -> NDArray[np.float64]:
        """Returns values of the robot [..., A] as numbers in [-1, 1]: 2 (v - low) / (high - low + 1e-8) - 1, clipped.

        Raises:
            ConfigError: the last axis is not A long.
        """
        given = self._checked(values)
        scaled = 2.0 * (given - self.low) / (self.high - self.low + OFT_EPSILON) - 1.0
        return np.clip(np.where(self.mask, scaled, given), -1.0, 1.0)

    def _checked(self, values: ArrayLike) -> NDArray[np.float64]:
        given = np.asarray(values, np.float64)
        if given.shape[-1:] != (self.dim,):
            raise ConfigError(
                f"values have the shape {given.shape}, but the statistics have {self.dim} dimensions: use the "
                "unnorm_key of a data set of this robot"
            )
        return given


def range_of(
    statistics: Mapping[str, object], unnorm_key: str | None, section: str = "action", scaling: Scaling | None = None
) -> Range:
    """Returns the range of a data set's actions or proprioception.

    Args:
        statistics: what dataset_statistics.json or norm_stats of config.json holds, by data set.
        unnorm_key: the data set; None where there is only one.
        section: "action" or "proprio".
        scaling: quantiles if it is not given.

    Raises:
        ConfigError: `unnorm_key` is unknown, or missing although there are several data sets.
        CheckpointError: the data set has no such statistics, or of unequal lengths.
    """
    key = _known_key(statistics, unnorm_key)
    values = cast("Mapping[str, object]", statistics[key]).get(section)
    low_name, high_name = _KEYS[scaling or Scaling.quantiles]
    if not isinstance(values, Mapping) or low_name not in values or high_name not in values:
        raise CheckpointError(
            f"the statistics of {key!r} have no {section}.{low_name} and {section}.{high_name}, which scale values: "
            "use another unnorm_key or copy dataset_statistics.json again"
        )
    low, high = (np.asarray(values[name], np.float64) for name in (low_name, high_name))
    mask = np.asarray(values.get("mask", np.ones(low.shape)), bool)
    if not low.ndim == 1 or not low.shape == high.shape == mask.shape:
        raise CheckpointError(
            f"the statistics of {key!r} have {section}.{low_name}, {high_name} and mask of the shapes {low.shape}, "
            f"{high.shape} and {mask.shape}, but they must be equal: copy dataset_statistics.json again"
        )
    return Range(low, high, mask)


def require_dim(found: Range, wanted: int, unnorm_key: str | None, section: str = "action") -> None:
    """Checks that statistics fit an action head or a robot.

    Raises:
        ConfigError: they have another number of dimensions.
    """
    if found.dim != wanted:
        raise ConfigError(
            f"unnorm_key {unnorm_key!r} has {section} statistics of {found.dim} dimensions, but {wanted} are needed: "
            "use the unnorm_key of a data set of this robot"
        )


def _known_key(statistics: Mapping[str, object], unnorm_key: str | None) -> str:
    names = ", ".join(sorted(statistics)) or "none"
    if unnorm_key is None:
        if len(statistics) != 1:
            raise ConfigError(f"unnorm_key is not given, but the checkpoint has statistics of {names}: choose one")
        return next(iter(statistics))
    if unnorm_key not in statistics:
        raise ConfigError(
            f"unnorm_key is {unnorm_key!r}, but the checkpoint has statistics of {names}: use one of these, or give a "
            "checkpoint that was trained on this data set"
        )
    return unnorm_key
