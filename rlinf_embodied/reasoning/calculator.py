"""A calculator for the model's turns (`tool._target_=rlinf_embodied.reasoning.calculator.calculate`)."""

from __future__ import annotations

import re

from rlinf_embodied.data.problems import Problem

# one operation on whole numbers of up to nine digits, at the end of a turn: "12*4=", "Then 48 + 50 ="
_OPERATION = re.compile(r"(?:^|[^0-9.])(-?[0-9]{1,9})( ?)([-+*/]) ?(-?[0-9]{1,9}) ?= ?$")


def calculate(text: str, problem: Problem) -> str | None:
    """Returns the value with a semicolon, or in a line of its own where the text has spaces; None: no operation.

    "12*4=" gives "48;", and "12 * 4 =" gives " 48" and a new line.  Divisions that leave a remainder have no value.
    """
    found = _OPERATION.search(text)
    if found is None:
        return None
    a, b, sign = int(found[1]), int(found[4]), found[3]
    if sign == "/":
        if b == 0 or a % b:
            return None
        value = a // b
    else:
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
    return f" {value}\n" if found[2] else f"{value};"
