"""The process that asks math-verify: a line of JSON in, [answer, reference]; a line out, 1 or 0.

The kernel ends the process when one question has used up its processor time, also in the middle of C code, and however
busy the machine is.  Run as `python -m rlinf_embodied.reasoning.verifier_worker <seconds>`.
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
    """Answers questions until the other side closes the pipe."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for answer, reference in (("$\\frac{1}{2}$", "$0.5$"), ("$x^2-1$", "$(x-1)(x+1)$")):
        are_equal(answer, reference)  # builds tables and patterns that no question should have to pay for
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        equal = are_equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(b"1\n" if equal else b"0\n")


def are_equal(answer: str, reference: str) -> bool:
    """Returns whether math-verify takes two texts for the same; what it stumbles over is not.

    Its own time limits are off: they need alarm signals, and do not interrupt C code.
    """
    sympy_random.seed(0)  # simplification tries random points: the same ones for each question
    try:
        parsed = parse(reference, parsing_timeout=None), parse(answer, parsing_timeout=None)  # type: ignore[arg-type]
        return bool(verify(*parsed, timeout_seconds=None))
    except Exception:  # noqa: BLE001 (a process boundary: too deep, too large or malformed all mean "not equal")
        return False


if __name__ == "__main__":
    main()
