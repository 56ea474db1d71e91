"""The process that runs math-verify: a line of JSON in, [answer, reference]; a line out, 1 or 0.

The kernel ends the process when one comparison exceeds its processor time, even within C code, and independently of the
machine's load.  Run as `python -m rlinf_embodied.reasoning.verifier_worker <seconds>`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

from math_verify import parse, verify
from sympy.core import random as sympy_random

_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Compares pairs until the owner closes the pipe."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # text printed by libraries must not be read as a reply
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for answer, reference in (("$\\frac{1}{2}$", "$0.5$"), ("$x^2-1$", "$(x-1)(x+1)$")):
        are_equal(answer, reference)  # builds tables and patterns before any time is counted
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        equal = are_equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(b"1\n" if equal else b"0\n")


def are_equal(answer: str, reference: str) -> bool:
    """Returns whether math-verify considers two texts equal; texts that it cannot handle are not.

    Its time limits are disabled: they use alarm signals, which do not interrupt C code.
    """
    sympy_random.seed(0)  # simplification tries random points: the same ones for each comparison
    try:
        parsed = parse(reference, parsing_timeout=None), parse(answer, parsing_timeout=None)  # type: ignore[arg-type]
        return bool(verify(*parsed, timeout_seconds=None))
    except Exception:  # noqa: BLE001 (a process boundary: too deep, too large or malformed all mean "not equal")
        return False


if __name__ == "__main__":
    main()
