"""math-verify in a separate process (verifier_worker.py), with hard limits for each comparison.

A comparison that exceeds its processor time, after which the kernel ends the process, counts as not equal.  So does one
during which three processes were killed for other reasons.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rlinf_embodied.reasoning.helper_process import HelperProcess
from rlinf_embodied.telemetry.progress import report_progress


class MathVerifier(HelperProcess):
    """Compares pairs of answers in a process that starts with the first pair.  One caller at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Sets the processor seconds of one comparison; starts nothing."""
        # a model's text is evaluated there, so tokens and passwords in the owner's environment are not passed on
        environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONHASHSEED": "0"}
        arguments = ("-m", "rlinf_embodied.reasoning.verifier_worker", str(timeout_s))
        super().__init__("verifier", arguments, environment)

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns whether math-verify considers each (answer, reference) equal, in order.

        Raises:
            WorkerError: the process failed, for example because it cannot import math-verify.
        """
        results = []
        for pair in pairs:
            results.append(self.ask(json.dumps(pair).encode() + b"\n") == b"1\n")
            report_progress()
        return results
