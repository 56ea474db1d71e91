"""Arithmetic expressions: their exact value and the numbers that they are made of.

    sum     = product { ("+" | "-") product }
    product = signed { ("*" | "/") signed }
    signed  = [ "-" ] ( integer | "(" sum ")" )

Python's own parser would take far more than this, and may run for long on what a model makes up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 256  # characters: at most some 10^256 as a value
_DEEPEST = 32  # brackets within each other
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_TEXT = re.compile(r"[-+*/() 0-9]*")  # one way to read each character: a text that fails at its end fails at once


@dataclass(frozen=True, slots=True)
class Expression:
    """What "(3+5)*7" stands for: value 56, numbers (3, 5, 7)."""

    value: Fraction
    numbers: tuple[int, ...]  # in the order of the text


class _GrammarError(Exception):
    """The text breaks the grammar, or divides by zero."""


def evaluate(text: str) -> Expression | None:
    """Returns the value of an expression of integers with + - * / and brackets.

    Returns:
        None where the text is anything else, is longer than 256 characters, nests more than 32 brackets, or divides
        by 0.
    """
    if len(text) > _LONGEST or not _TEXT.fullmatch(text):
        return None
    reader = _Reader(_TOKEN.findall(text))
    try:
        value = reader.sum(0)
    except _GrammarError:
        return None
    return Expression(value, tuple(reader.numbers)) if reader.at_end() else None


class _Reader:
    """Goes through the tokens once, from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._next = tokens, 0
        self.numbers: list[int] = []

    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self._next == len(self._tokens)

    def sum(self, depth: int) -> Fraction:
        """Reads terms that are added and subtracted."""
        value = self._product(depth)
        while sign := self._take("+-"):
            term = self._product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while sign := self._take("*/"):
            factor = self._signed(depth)
            if sign == "/" and factor == 0:
                raise _GrammarError
            value = value * factor if sign == "*" else value / factor
        return value

    def _signed(self, depth: int) -> Fraction:
        if self._take("-"):
            return -self._bracket_or_number(depth)
        return self._bracket_or_number(depth)

    def _bracket_or_number(self, depth: int) -> Fraction:
        if self._take("("):
            if depth == _DEEPEST:
                raise _GrammarError
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise _GrammarError
            return value
        if self.at_end() or not self._tokens[self._next].isdigit():
            raise _GrammarError
        self.numbers.append(int(self._tokens[self._next]))
        self._next += 1
        return Fraction(self.numbers[-1])

    def _take(self, choices: str) -> str:
        """Returns the next token and moves on if it is one of `choices`, else an empty text."""
        if self.at_end() or self._tokens[self._next] not in choices:
            return ""
        self._next += 1
        return self._tokens[self._next - 1]
