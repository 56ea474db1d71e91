"""Generated arithmetic problems: a problem is a pure function of (level, seed, split, position).

Questions and steps are written compactly, without spaces: a small model with a character vocabulary can read them.
A drawn problem that breaks a bound of its family is None, and the caller draws again.

| level    | question     | solution                   | answer |
| sum4-6-9 | 7+8+6-2-4-9= | 7+8=15;15+6=21;...;15-9=6; | 6      |
| chain2-3 | 12*4+50-7=   | 12*4=48;48+50=98;98-7=91;  | 91     |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.randomness import words

_MOST_DRAWS = 20_000  # for one problem; a test problem takes some ten times as many as its level refuses
_MASK = (1 << 64) - 1
_LARGEST_TOTAL = 999  # of chains: three digits


class Draws:
    """A stream of integers made from one keyed word.

    The numbers are SplitMix64's outputs (Steele, Lea, Flood 2014) in plain Python: a problem needs some twenty of them,
    one after the other, and numpy takes longer than that to start.
    """

    def __init__(self, word: int) -> None:
        self._state = word & _MASK

    def integer(self, low: int, high: int) -> int:
        """Returns an integer in low..high, both included; the bias is below (high - low) / 2^64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        x = self._state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return low + (((x ^ (x >> 31)) * (high - low + 1)) >> 64)

    def sign(self) -> str:
        """Returns "+" or "-", each half of the time."""
        return "+-"[self.integer(0, 1)]


Draft = tuple[str, list[str], int]  # question, steps of its solution, answer


@dataclass(frozen=True, slots=True)
class Level:
    """A family with its sizes: "sum4-6-9" is family "sum", sizes (4, 6, 9)."""

    name: str
    family: str
    sizes: tuple[int, ...]

    def draw(self, draws: Draws) -> Draft | None:
        """Returns a problem, or None where the numbers drawn break a bound."""
        return _FAMILIES[self.family][0](draws, *self.sizes)


def parse_level(name: str) -> Level:
    """Returns the level that a name such as "sum4-6-9" stands for.

    Raises:
        ConfigError: there is no such family, or its sizes make no sense.
    """
    found = re.fullmatch(r"([a-z]+)([0-9]+(?:-[0-9]+)*)", name)
    _, form = _FAMILIES.get(found[1], (None, "")) if found else (None, "")
    sizes = tuple(int(size) for size in found[2].split("-")) if found else ()
    if not form or len(sizes) != form.count("-") + 1 or min(sizes) < 1 or sizes[:1] > sizes[1:2]:
        forms = ", ".join(form for _, form in _FAMILIES.values())
        raise ConfigError(f"data.level is {name!r}, but a level is one of {forms}: choose one, for example sum4-6-9")
    return Level(name, found[1] if found else "", sizes)


def draw_sum(draws: Draws, low: int, high: int, largest: int) -> Draft | None:
    """Draws low..high further terms of at most `largest`; no total is negative or above 11 times `largest`."""
    total = draws.integer(1, largest)
    question, steps = str(total), []
    for _ in range(draws.integer(low, high)):
        sign, term = draws.sign(), draws.integer(1, largest)
        after = total + term if sign == "+" else total - term
        if not 0 <= after <= 11 * largest:
            return None
        question += f"{sign}{term}"
        steps.append(f"{total}{sign}{term}={after}")
        total = after
    return question + "=", steps, total


def draw_chain(draws: Draws, low: int, high: int) -> Draft | None:
    """Draws low..high operations on two-digit numbers: products first, then left to right; totals within 0..999."""
    left = draws.integer(low, high)
    terms, signs, products = [], [], []
    while left >= 0:
        signs.append(draws.sign() if terms else "")
        is_product = left >= 1 and draws.integer(1, 100) <= 35
        left -= 2 if is_product else 1
        if not is_product:
            terms.append((str(number := draws.integer(2, 99)), number))
            continue
        a, b = draws.integer(11, 99), draws.integer(2, 9)
        products.append(f"{a}*{b}={a * b}")
        terms.append((f"{a}*{b}", a * b))
    return _summed_up(terms, signs, products)


def _summed_up(terms: list[tuple[str, int]], signs: list[str], steps: list[str]) -> Draft | None:
    question, total = terms[0]
    for (text, value), sign in zip(terms[1:], signs[1:], strict=True):
        after = total + value if sign == "+" else total - value
        if not 0 <= after <= _LARGEST_TOTAL:
            return None
        question += sign + text
        steps.append(f"{total}{sign}{value}={after}")
        total = after
    return (question + "=", steps, total) if total <= _LARGEST_TOTAL else None


_FAMILIES: dict[str, tuple[Callable[..., Draft | None], str]] = {
    "sum": (draw_sum, "sumLOWEST-HIGHEST-LARGEST (further terms, largest term)"),
    "chain": (draw_chain, "chainLOWEST-HIGHEST (operations)"),
}


# -------------------------------------------------------------------------------------------------------------- streams
class GeneratedProblems:
    """Endless streams of problems of some levels; a problem's level is drawn with it.

    With few small numbers a level has few questions, and a stream meets them again.  Splits share none of them.
    """

    def __init__(self, levels: str, seed: int) -> None:
        """Makes the streams; nothing is drawn yet.

        Args:
            levels: one level ("sum4-6-9"), or several joined by commas, drawn with equal shares.
            seed: data seed.

        Raises:
            ConfigError: there is no such level.
        """
        self._levels = [parse_level(name.strip()) for name in levels.split(",")]
        self._seed = seed

    def size(self, split: Split) -> None:
        """Returns None: there is always a next problem."""
        return None

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """Returns the problems at positions start .. start + count - 1; see ProblemSource.

        Raises:
            ConfigError: a level has no question in this split.
        """
        positions = np.arange(start, start + count)
        keys = words(self._seed, f"problem/{split}", positions).tolist()
        return [self._problem(split, position, key) for position, key in zip(positions.tolist(), keys, strict=True)]

    def _problem(self, split: Split, position: int, key: int) -> Problem:
        draws = Draws(key)
        level = self._levels[draws.integer(0, len(self._levels) - 1)]
        question, steps, answer = _draft(level, split, draws)
        solution, identity = "".join(f"{step};" for step in steps), problem_id(split, position)
        return Problem(identity, question, str(answer), solution, level.family, level.name)


def _draft(level: Level, split: Split, draws: Draws) -> Draft:
    """Draws until a problem keeps its family's bounds and its question belongs to the split."""
    for _ in range(_MOST_DRAWS):
        draft = level.draw(draws)
        if draft is not None and split_of(draft[0]) is split:
            return draft
    raise ConfigError(
        f"data.level is {level.name!r}, but {_MOST_DRAWS} draws gave no question for the split {split.value!r}: "
        "choose larger sizes, so that there are more questions"
    )
