"""A calculator for the model's turns (`tool._target_=experiments.examples.calculator.calculate`)."""

from __future__ import annotations

import re

from rlinf_embodied.data.problems import Problem

# one operation on integers of up to nine digits, at the end of a turn: "12*4=", "Then 48 + 50 ="
_OPERATION = re.compile(r"(?:^|[^0-9.])(-?[0-9]{1,9})( ?)([-+*/]) ?(-?[0-9]{1,9}) ?= ?$")


def calculate(text: str, problem: Problem) -> str | None:
    """Returns the value of the operation at the end of a text; None without one, or if a division has a remainder.

    "12*4=" gives "48;", and "12 * 4 =" gives " 48" and a new line.
    """
    match = _OPERATION.search(text)
    if match is None:
        return None
    a, b, sign = int(match[1]), int(match[4]), match[3]
    if sign == "/":
        if b == 0 or a % b:
            return None
        value = a // b
    else:
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
    return f" {value}\n" if match[2] else f"{value};"
