"""Generated arithmetic problems: a problem is a pure function of (level, seed, split, position).

Questions and steps are written compactly, without spaces: a small model with a character vocabulary can read them.
A drawn problem that breaks a bound of its family is None, and the caller draws again.

| level        | question     | solution                   | answer  |
| sum4-6-9     | 7+8+6-2-4-9= | 7+8=15;15+6=21;...;15-9=6; | 6       |
| chain2-3     | 12*4+50-7=   | 12*4=48;48+50=98;98-7=91;  | 91      |
| linear2-20   | 5x+3=2x+18?  | 3x+3=18;3x=15;x=5;         | 5       |
| countdown3-9 | 2,5,8:26?    | 8+5=13;13*2=26;            | (8+5)*2 |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlinf_embodied.data.problems import Countdown, Problem, Split, problem_id, split_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.randomness import words

_MOST_DRAWS = 20_000  # for one problem; a test problem takes some ten times as many as its level refuses
_MASK = (1 << 64) - 1
_LARGEST_TOTAL = 999  # of chains and countdown: three digits
_LARGEST_COUNT, _LARGEST_NUMBER = 40, 9999  # what a level may ask for


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


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem that has no place in a stream yet."""

    question: str
    solution: str
    answer: str
    rule: Countdown | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """A family with its sizes: "sum4-6-9" is family "sum", sizes (4, 6, 9)."""

    name: str
    family: str
    sizes: tuple[int, ...]

    def draw(self, draws: Draws) -> Draft | None:
        """Returns a problem, or None where the numbers drawn break a bound."""
        return _FAMILIES[self.family].draw(draws, *self.sizes)


@dataclass(frozen=True, slots=True)
class _Family:
    draw: Callable[..., Draft | None]
    form: str  # how its levels are written
    accepts: Callable[..., bool]  # which sizes make sense


def parse_level(name: str) -> Level:
    """Returns the level that a name such as "sum4-6-9" stands for.

    Raises:
        ConfigError: there is no such family, or its sizes make no sense.
    """
    found = re.fullmatch(r"([a-z]+)([0-9]+(?:-[0-9]+)*)", name)
    family = _FAMILIES.get(found[1]) if found else None
    if found is None or family is None:
        raise ConfigError(f"data.level is {name!r}, but a level is one of {_forms()}: choose one, for example sum4-6-9")
    sizes = tuple(int(size) for size in found[2].split("-"))
    if found[1] == "chain" and len(sizes) == 1:
        sizes = sizes * 2
    if len(sizes) != family.form.count("-") + 1 or not family.accepts(*sizes):
        raise ConfigError(f"data.level is {name!r}, but levels of this family are {family.form}: choose such sizes")
    return Level(name, found[1], sizes)


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
    return Draft(question + "=", _joined(steps), str(total))


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
    return Draft(question + "=", _joined(steps), str(total)) if total <= _LARGEST_TOTAL else None


def draw_linear(draws: Draws, sides: int, largest: int) -> Draft | None:
    """Draws a x + b = d, or with two sides a x + b = c x + d; x is an integer other than 0 in -largest..largest."""
    x, a, b = draws.integer(-largest, largest), draws.integer(2, 9), draws.integer(-99, 99)
    c = draws.integer(1, a - 1) if sides == 2 else 0
    d = (a - c) * x + b
    if x == 0 or b == 0 or d == 0:
        return None
    right = f"{_times_x(c)}{d:+d}" if c else str(d)
    steps = [f"{_times_x(a - c)}{b:+d}={d}"] if c else []
    steps.append(f"{_times_x(a - c)}={d - b}")
    if a - c > 1:
        steps.append(f"x={x}")
    return Draft(f"{_times_x(a)}{b:+d}={right}?", _joined(steps), str(x))


def draw_countdown(draws: Draws, count: int, largest: int) -> Draft | None:
    """Draws `count` numbers of at most `largest`, and a target made of them all by + - * with values in 1..999."""
    numbers = sorted(draws.integer(1, largest) for _ in range(count))
    items = [(number, str(number), "") for number in numbers]  # value, text, the operation made last
    steps = []
    while len(items) > 1:
        a = items.pop(draws.integer(0, len(items) - 1))
        b = items.pop(draws.integer(0, len(items) - 1))
        sign = "+-*"[draws.integer(0, 2)]
        value = {"+": a[0] + b[0], "-": a[0] - b[0], "*": a[0] * b[0]}[sign]
        if not 1 <= value <= _LARGEST_TOTAL:
            return None
        steps.append(f"{a[0]}{sign}{b[0]}={value}")
        items.append((value, _combined(a, sign, b), sign))
    target, answer, _ = items[0]
    if target in numbers:  # one number alone would do
        return None
    question = f"{','.join(map(str, numbers))}:{target}?"  # sorted, so that no reordering is in another split
    return Draft(question, _joined(steps), answer, Countdown(target, tuple(numbers)))


def _combined(a: tuple[int, str, str], sign: str, b: tuple[int, str, str]) -> str:
    """Text of an operation, with brackets only where they are needed."""
    left = f"({a[1]})" if sign == "*" and a[2] in ("+", "-") else a[1]
    right = f"({b[1]})" if b[2] in ("+", "-") and sign in "*-" else b[1]
    return left + sign + right


def _times_x(factor: int) -> str:
    return "x" if factor == 1 else f"{factor}x"


def _joined(steps: list[str]) -> str:
    return "".join(f"{step};" for step in steps)


def _forms() -> str:
    return ", ".join(family.form for family in _FAMILIES.values())


_FAMILIES = {
    "sum": _Family(
        draw_sum,
        "sumLOWEST-HIGHEST-LARGEST (further terms, largest term)",
        lambda low, high, largest: 1 <= low <= high <= _LARGEST_COUNT and 1 <= largest <= _LARGEST_NUMBER,
    ),
    "chain": _Family(
        draw_chain,
        "chainLOWEST-HIGHEST (operations, up to 8)",
        lambda low, high: 1 <= low <= high <= 8,
    ),
    "linear": _Family(
        draw_linear,
        "linearSIDES-LARGEST (x on 1 or 2 sides, largest solution)",
        lambda sides, largest: sides in (1, 2) and 1 <= largest <= _LARGEST_NUMBER,
    ),
    "countdown": _Family(
        draw_countdown,
        "countdownCOUNT-LARGEST (2 to 6 numbers, the largest one from 2 to 99)",
        lambda count, largest: 2 <= count <= 6 and 2 <= largest <= 99,
    ),
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
        draft = _draft(level, split, draws)
        return Problem(
            id=problem_id(split, position),
            question=draft.question,
            answer=draft.answer,
            solution=draft.solution,
            family=level.family,
            level=level.name,
            rule=draft.rule,
        )


def _draft(level: Level, split: Split, draws: Draws) -> Draft:
    """Draws until a problem keeps its family's bounds and its question belongs to the split."""
    for _ in range(_MOST_DRAWS):
        draft = level.draw(draws)
        if draft is not None and split_of(draft.question) is split:
            return draft
    raise ConfigError(
        f"data.level is {level.name!r}, but {_MOST_DRAWS} draws gave no question for the split {split.value!r}: "
        "choose larger sizes, so that there are more questions"
    )
