"""Actions as tokens: bins over [-1, 1] that are the last ids of the vocabulary, the lowest value at the highest id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.openvla.settings import OpenVLAConfig


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """The map between normalised action values and token ids.

    `num_bins` edges over [-1, 1] make num_bins - 1 bins, so that the two lowest ids mean the same value.
    """

    num_tokens: int
    num_bins: int

    @classmethod
    def of(cls, config: OpenVLAConfig) -> ActionTokens:
        """Returns the map of a checkpoint."""
        return cls(config.num_tokens, config.num_bins)

    @property
    def edges(self) -> NDArray[np.float64]:
        """The edges of the bins, ascending, [num_bins]."""
        return np.linspace(-1.0, 1.0, self.num_bins)

    @property
    def centers(self) -> NDArray[np.float64]:
        """The values that tokens stand for, ascending, [num_bins - 1]."""
        edges = self.edges
        return (edges[:-1] + edges[1:]) / 2.0

    def encode(self, values: ArrayLike) -> NDArray[np.int64]:
        """Returns the ids of normalised values (any shape); values beyond [-1, 1] are clipped."""
        bins = np.digitize(np.clip(np.asarray(values, np.float64), -1.0, 1.0), self.edges)
        return (self.num_tokens - bins).astype(np.int64)

    def decode(self, ids: ArrayLike) -> NDArray[np.float64]:
        """Returns the normalised values of ids (any shape); an id that is no action counts as the nearest one."""
        bins = self.num_tokens - np.asarray(ids, np.int64) - 1
        return self.centers[np.clip(bins, 0, self.num_bins - 2)]
