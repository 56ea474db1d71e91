"""math-verify in a process, each question under hard limits.

The kernel ends the process (verifier_worker.py) that used up its processor time: its question counts as not equal.  So
does one at which three processes were killed in any other way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rlinf_embodied.reasoning.helper_process import HelperProcess
from rlinf_embodied.telemetry.progress import report_progress


class MathVerifier(HelperProcess):
    """Compares pairs of answers; its process starts with the first question and stays.  One caller at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Takes the processor seconds that one question may take; starts nothing yet."""
        # what a model wrote goes through a computer algebra system there: the owner's tokens and passwords stay here
        environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONHASHSEED": "0"}
        arguments = ("-m", "rlinf_embodied.reasoning.verifier_worker", str(timeout_s))
        super().__init__("verifier", arguments, environment)

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns, for each (answer, reference) in order, whether math-verify takes them for the same.

        Raises:
            WorkerError: the process failed, for example because it cannot import math-verify.
        """
        results = []
        for pair in pairs:
            results.append(self.ask(json.dumps(pair).encode() + b"\n") == b"1\n")
            report_progress()
        return results
