"""Conversion of actions between robot units, normalised values in [-1, 1], and token ids of bins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import CheckpointError

_KEY = "policy.options.unnorm_key"
OFT_EPSILON = 1e-8  # added to the width of a range by OFT, not by OpenVLA


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """Maps normalised values to the last token ids of the vocabulary; the highest id is the lowest value.

    `num_bins` edges over [-1, 1] make num_bins - 1 bins, so that the two lowest ids mean the same value.
    """

    num_tokens: int
    num_bins: int

    @property
    def edges(self) -> NDArray[np.float64]:
        """The edges of the bins, ascending, [num_bins]."""
        return np.linspace(-1.0, 1.0, self.num_bins)

    def encode(self, values: ArrayLike) -> NDArray[np.int64]:
        """Returns the ids of normalised values (any shape); values beyond [-1, 1] are clipped."""
        bins = np.digitize(np.clip(np.asarray(values, np.float64), -1.0, 1.0), self.edges)
        return (self.num_tokens - bins).astype(np.int64)

    def decode(self, ids: ArrayLike) -> NDArray[np.float64]:
        """Returns the normalised values of ids (any shape); ids that are no actions are clipped to the nearest one."""
        centers = (self.edges[:-1] + self.edges[1:]) / 2.0
        bins = self.num_tokens - np.asarray(ids, np.int64) - 1
        return centers[np.clip(bins, 0, self.num_bins - 2)]


@dataclass(frozen=True, slots=True)
class Range:
    """The range of every dimension, float64 [A]; `mask` [A] is false for dimensions that are not scaled."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mask: NDArray[np.bool_]

    def expand(self, values: NDArray[np.floating], epsilon: float = 0.0) -> NDArray[np.float64]:
        """Returns robot values of normalised values a [..., A]: low + (a + 1) / 2 * (high - low + epsilon)."""
        normalised = np.asarray(values, np.float64)
        return np.where(self.mask, 0.5 * (normalised + 1.0) * (self.high - self.low + epsilon) + self.low, normalised)

    def normalise(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Returns robot values v [..., A] normalised to [-1, 1]: 2 (v - low) / (high - low + 1e-8) - 1, clipped."""
        unscaled = np.asarray(values, np.float64)
        scaled = 2.0 * (unscaled - self.low) / (self.high - self.low + OFT_EPSILON) - 1.0
        return np.clip(np.where(self.mask, scaled, unscaled), -1.0, 1.0)


def range_of(
    statistics: Mapping[str, object], unnorm_key: str | None, section: str = "action", dim: int | None = None
) -> Range:
    """Returns the range of a data set's actions or proprioception: their 1st and 99th percentile.

    Args:
        statistics: content of dataset_statistics.json, or norm_stats of config.json, by data set.
        unnorm_key: the data set; None where there is only one.
        section: "action" or "proprio".
        dim: required number of dimensions; None: any.

    Raises:
        ConfigError: `unnorm_key` is unknown, has another number of dimensions, or is missing with several data sets.
        CheckpointError: the data set has no such statistics, or their lengths are unequal.
    """
    key = next(iter(statistics)) if unnorm_key is None and len(statistics) == 1 else unnorm_key or ""
    rule = f"the checkpoint has statistics of {', '.join(sorted(statistics)) or 'none'}"
    require(key in statistics, _KEY, unnorm_key, rule, "use one of these, or fine-tune on data")
    values = cast("Mapping[str, Mapping[str, ArrayLike]]", statistics[key]).get(section, {})
    if "q01" not in values or "q99" not in values:
        raise CheckpointError(
            f"the statistics of {key!r} have no {section}.q01 and {section}.q99, which scale values: use another "
            "unnorm_key or copy dataset_statistics.json again"
        )
    low, high = (np.asarray(values[name], np.float64) for name in ("q01", "q99"))
    mask = np.asarray(values.get("mask", np.ones(low.shape)), bool)
    if not low.ndim == 1 or not low.shape == high.shape == mask.shape:
        raise CheckpointError(
            f"the statistics of {key!r} have {section}.q01, q99 and mask of the shapes {low.shape}, {high.shape} and "
            f"{mask.shape}, but they must be equal: copy dataset_statistics.json again"
        )
    rule = f"the data set's {section} statistics have {len(low)} dimensions, and {dim} are needed"
    require(
        dim in (None, len(low)), _KEY, unnorm_key, rule, "use that of a data set of this robot, or fine-tune on data"
    )
    return Range(low, high, mask)
