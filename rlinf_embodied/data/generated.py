"""Generated arithmetic problems: a problem is a pure function of (level, seed, split, position).

Questions and steps are written compactly, without spaces: a small model with a character vocabulary can read them.
A draw that breaks a bound of its family returns None, and the caller draws again.

| level    | question     | solution                   | answer |
| sum4-6-9 | 7+8+6-2-4-9= | 7+8=15;15+6=21;...;15-9=6; | 6      |
| chain2-3 | 12*4+50-7=   | 12*4=48;48+50=98;98-7=91;  | 91     |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.randomness import words

_MOST_DRAWS = 20_000  # for one problem; only a tenth of the valid draws are test problems
_MASK = (1 << 64) - 1
_LARGEST_TOTAL = 999  # of chains: three digits


class Draws:
    """A stream of integers made from one keyed word.

    The numbers are SplitMix64's outputs (Steele, Lea, Flood 2014) in plain Python: a problem needs about twenty, which
    take less time than setting up a numpy generator.
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


Draft = tuple[str, list[str], int]  # question, steps of its solution, answer


def draw_sum(draws: Draws, low: int, high: int, largest: int) -> Draft | None:
    """Draws low..high further terms of at most `largest`; no total is negative or above 11 times `largest`."""
    total = first = draws.integer(1, largest)
    terms = [("", str(first), first)]
    for _ in range(draws.integer(low, high)):
        sign, term = "+-"[draws.integer(0, 1)], draws.integer(1, largest)
        total += term if sign == "+" else -term
        if not 0 <= total <= 11 * largest:
            return None
        terms.append((sign, str(term), term))
    return _summed_up(terms, [], 11 * largest)


def draw_chain(draws: Draws, low: int, high: int) -> Draft | None:
    """Draws low..high operations on two-digit numbers: products first, then left to right; totals within 0..999."""
    num_left, terms, products = draws.integer(low, high), [], []
    while num_left >= 0:
        sign = "+-"[draws.integer(0, 1)] if terms else ""
        if num_left >= 1 and draws.integer(1, 100) <= 35:
            a, b = draws.integer(11, 99), draws.integer(2, 9)
            products.append(f"{a}*{b}={a * b}")
            terms.append((sign, f"{a}*{b}", a * b))
            num_left -= 2
        else:
            number = draws.integer(2, 99)
            terms.append((sign, str(number), number))
            num_left -= 1
    return _summed_up(terms, products, _LARGEST_TOTAL)


def _summed_up(terms: Sequence[tuple[str, str, int]], steps: list[str], largest: int) -> Draft | None:
    """Returns the draft of (sign, text, value) of each term, added up step by step after the first `steps`."""
    total = terms[0][2]
    for sign, _, value in terms[1:]:
        after = total + value if sign == "+" else total - value
        if not 0 <= after <= largest:
            return None
        steps.append(f"{total}{sign}{value}={after}")
        total = after
    return "".join(sign + text for sign, text, _ in terms) + "=", steps, total


_FAMILIES: dict[str, tuple[Callable[..., Draft | None], str]] = {
    "sum": (draw_sum, "sumLOWEST-HIGHEST-LARGEST (further terms, largest term)"),
    "chain": (draw_chain, "chainLOWEST-HIGHEST (operations)"),
}


def parse_level(name: str) -> tuple[str, list[int]]:
    """Returns the family and the sizes of a level: ("sum", [4, 6, 9]) for "sum4-6-9".

    Raises:
        ConfigError: the family does not exist, or the sizes are invalid.
    """
    match = re.fullmatch(r"([a-z]+)([0-9]+(?:-[0-9]+)*)", name)
    family = match[1] if match else ""
    sizes = [int(size) for size in match[2].split("-")] if match else []
    _, form = _FAMILIES.get(family, (None, ""))
    if not form or len(sizes) != form.count("-") + 1 or min(sizes) < 1 or sizes[0] > sizes[1]:
        forms = ", ".join(form for _, form in _FAMILIES.values())
        raise ConfigError(f"data.level is {name!r}, but a level is one of {forms}: choose one, for example sum4-6-9")
    return family, sizes


class GeneratedProblems:
    """Endless streams of problems of some levels; the level of each problem is drawn, too.

    A level with few small numbers has few questions, which a stream repeats.  Splits share no question.
    """

    def __init__(self, levels: str, seed: int) -> None:
        """Takes one level ("sum4-6-9"), or several joined by commas, drawn with equal shares; draws nothing yet."""
        self._levels, self._seed = [name.strip() for name in levels.split(",")], seed
        self._parsed = {name: parse_level(name) for name in self._levels}

    def size(self, split: Split) -> None:
        """Returns None: the stream is endless."""

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """As ProblemSource; raises ConfigError if a level has no question in the split."""
        positions = np.arange(start, start + count)
        keys = words(self._seed, f"problem/{split}", positions).tolist()
        return [self._problem(split, position, key) for position, key in zip(positions.tolist(), keys, strict=True)]

    def _problem(self, split: Split, position: int, key: int) -> Problem:
        """Draws until a problem is within its family's bounds and its question belongs to the split."""
        draws = Draws(key)
        level = self._levels[draws.integer(0, len(self._levels) - 1)]
        family, sizes = self._parsed[level]
        for _ in range(_MOST_DRAWS):
            draft = _FAMILIES[family][0](draws, *sizes)
            if draft is not None and split_of(draft[0]) is split:
                question, steps, answer = draft
                solution = "".join(f"{step};" for step in steps)
                return Problem(problem_id(split, position), question, str(answer), solution, family, level)
        raise ConfigError(
            f"data.level is {level!r}, but {_MOST_DRAWS} draws gave no question for the split {split.value!r}: "
            "choose larger sizes, so that there are more questions"
        )
