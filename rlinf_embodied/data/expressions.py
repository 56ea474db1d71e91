"""Arithmetic expressions: their exact value and the numbers that they are made of.

    integers, + - * / and brackets, as "(3+5)*-7"

Python's parser reads them, once the text is known to be short and to hold nothing else.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 256  # characters: at most some 10^256 as a value
_TEXT = re.compile(r"[-+*/() 0-9]*")
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")  # which Python refuses
_TWO_SIGNS = re.compile(r"(?:^|[-+*/(])[ ]*-[ ]*-")  # as "--1", which Python takes
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True, slots=True)
class Expression:
    """What "(3+5)*7" stands for: value 56, numbers (3, 5, 7)."""

    value: Fraction
    numbers: tuple[int, ...]  # in the order of the text


class _GrammarError(Exception):
    """The text has another operator, such as **, or a call."""


def evaluate(text: str) -> Expression | None:
    """Returns the value of an expression of integers with + - * / and brackets.

    Returns:
        None where the text is anything else, is longer than 256 characters, or divides by 0.
    """
    if len(text) > _LONGEST or not _TEXT.fullmatch(text) or _TWO_SIGNS.search(text):
        return None
    numbers: list[int] = []
    try:
        value = _value(ast.parse(_LEADING_ZEROS.sub("", text.strip()), mode="eval").body, numbers)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError, _GrammarError):
        return None
    return Expression(value, tuple(numbers))


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """Returns the value of a node, and appends its numbers from left to right."""
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first = _value(left, numbers)
            return _OPERATORS[type(op)](first, _value(right, numbers))
    raise _GrammarError
