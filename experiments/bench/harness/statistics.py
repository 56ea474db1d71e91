"""Repeated measurements: arms in alternation, spreads, ratios round by round, goals."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Returns median, smallest and largest."""
        numbers = list(values)
        return Spread(statistics.median(numbers), min(numbers), max(numbers), len(numbers))

    def __format__(self, form: str) -> str:
        """Formats each number, for example "12.0 (11.5-13.1)"."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for so many units of work, and where they went."""

    seconds: float
    count: int  # env steps, observations, resets
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by name

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio, and what it should reach."""

    name: str
    ratio: Spread  # of the rounds, each numerator over its own round's denominator
    goal: float

    @property
    def reached(self) -> bool:
        return self.ratio.median >= self.goal

    def __str__(self) -> str:
        """Returns, for example, "(b) / (a): 31.20 (30.10-33.00), goal 20: reached"."""
        return f"{self.name}: {self.ratio:.2f}, goal {self.goal:g}: {'reached' if self.reached else 'missed'}"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "reached": self.reached}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Returns the spread of the quotients round by round, which shares whatever slowed a round as a whole."""
    return Spread.of(a / b for a, b in zip(above, below, strict=True))


def alternate(
    arms: Mapping[str, Callable[[], _Found]], rounds: int, warm_up: int = 0, quiet: bool = False
) -> dict[str, list[_Found]]:
    """Returns what each arm gave, round by round; arms alternate, so that other work disturbs them alike.

    Args:
        arms: what is called once per round, by name; every other round goes backwards.
        rounds: that count.
        warm_up: rounds before them.
        quiet: whether no line is printed after each of those that count.
    """
    found: dict[str, list[_Found]] = {name: [] for name in arms}
    anyway = gc.get_freeze_count() > 0
    for number in range(-warm_up, rounds):
        if number == 0:
            gc.collect()
            gc.freeze()  # no arm pays for looking through what the others keep
        for name in list(arms)[:: -1 if number % 2 else 1]:
            given = arms[name]()
            if number >= 0:
                found[name].append(given)
        if number >= 0 and not quiet:
            print(f"round {number + 1}/{rounds}", flush=True)
    if not anyway:
        gc.unfreeze()
    return found
