"""Paired comparisons of two arms on the same episodes: their difference, and the episodes needed to detect one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from rlinf_embodied.telemetry.metrics import Z95, mean_interval

_POWER = 0.8  # of the test with `num_needed` episodes


@dataclass(frozen=True, slots=True)
class PairedRate:
    """Numbers of episodes that both, one or none of two arms solved; differences are b - a."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @classmethod
    def of(cls, a: Sequence[bool], b: Sequence[bool]) -> PairedRate:
        """Counts outcomes of the same episodes in the same order."""
        pairs = list(zip(a, b, strict=True))
        return cls(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def number(self) -> int:
        """Episodes."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """The success rate of b minus that of a."""
        return (self.only_b - self.only_a) / self.number

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided exact McNemar test: each arm solves half of the differing ones by chance.

            p = min(1, 2 sum_{k <= min(b, c)} C(b + c, k) / 2^(b + c))

        (McNemar, "Note on the sampling error of the difference between correlated proportions", 1947.)
        """
        n = self.only_a + self.only_b
        tail = sum(math.comb(n, k) for k in range(min(self.only_a, self.only_b) + 1))
        return min(1.0, 2 * tail / 2**n)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference: Wald's, with half an episode added to each of the four counts.

            d +- z sqrt((b + c) - (c - b)^2 / n) / n,   d = (c - b) / n

        (Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", 2005.)
        """
        a, b, n = self.only_a + 0.5, self.only_b + 0.5, self.number + 2
        margin = Z95 * math.sqrt(a + b - (b - a) ** 2 / n) / n
        return max(-1.0, (b - a) / n - margin), min(1.0, (b - a) / n + margin)

    def num_needed(self, resolution: float) -> int:
        """Returns how many episodes detect a difference of `resolution` at the 5 % level with a power of 80 %.

            n = (z_0.975 sqrt(q) + z_power sqrt(q - d^2))^2 / d^2

        where q is the share of episodes that differ, here with Agresti and Min's counts (Connor, "Sample size for
        testing differences in proportions for the paired-sample design", 1987).
        """
        q = max((self.only_a + self.only_b + 1) / (self.number + 2), resolution)
        z = Z95 * math.sqrt(q) + NormalDist().inv_cdf(_POWER) * math.sqrt(q - resolution**2)
        return math.ceil((z / resolution) ** 2)

    def summary(self, resolution: float) -> dict[str, object]:
        """Returns the JSON form."""
        counts = {name: getattr(self, name) for name in ("both", "only_a", "only_b", "neither")}
        tests = {"difference": self.difference, "difference_interval": list(self.interval), "p_value": self.p_value}
        return counts | tests | {"resolution": resolution, "num_needed": self.num_needed(resolution)}


def paired_mean(a: Sequence[float], b: Sequence[float]) -> dict[str, object]:
    """Returns the mean of b - a over the same episodes with its 95 % interval, by the normal approximation."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return {"difference": fmean(differences), "difference_interval": list(mean_interval(differences))}
