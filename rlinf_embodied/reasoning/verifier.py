"""math-verify in a process, each question under hard limits.

    owner --[answer, reference]--> process (verifier_worker.py)      one question at a time
    owner <-------- 1 or 0 -------

The kernel ends a process that used up its processor time: its question counts as not equal.  A process that is killed
in any other way is replaced and its question asked again, so that this changes no result; a question that three
processes end at counts as not equal.  A process ends when the pipe to it is closed, also when its owner is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.telemetry.progress import report_progress

_LOG = logging.getLogger(__name__)
_MOST_ENDS = 3  # of processes, at one question


class MathVerifier:
    """Compares pairs of answers; its process starts with the first question and stays.  One caller at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Takes the processor seconds that one question may take; starts nothing yet."""
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns, for each (answer, reference) in order, whether math-verify takes them for the same.

        Raises:
            WorkerError: the process failed, for example because it cannot import math-verify.
        """
        results = []
        try:
            for pair in pairs:
                results.append(self._ask(json.dumps(pair).encode() + b"\n"))
                report_progress()
        except BaseException:
            self.close()  # its next reply would be to the question that was interrupted
            raise
        return results

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        if self._process is not None:
            self._process.kill()
            self._end(self._process)

    def _ask(self, question: bytes) -> bool:
        for number in range(_MOST_ENDS):
            process = self._process = self._process or self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(question)
            if reply := process.stdout.readline():
                return reply == b"1\n"
            status = self._end(process)
            if status == -signal.SIGPROF:
                break
            if status >= 0:
                raise WorkerError(
                    f"the verifier's process ended with status {status}: what it wrote above says why; install what is "
                    "missing"
                )
            _LOG.warning("a verifier process ended with status %s (%d. time at this answer)", status, number + 1)
        return False

    def _started(self) -> subprocess.Popen[bytes]:
        # what a model wrote goes through a computer algebra system there: the owner's tokens and passwords stay here
        environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONHASHSEED": "0"}
        if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some interpreters do not start without it
            environment["LD_LIBRARY_PATH"] = libraries
        return subprocess.Popen(
            [sys.executable, "-m", "rlinf_embodied.reasoning.verifier_worker", str(self._timeout_s)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the owner, which finishes its iteration
        )

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for a process that ended or was killed; returns its status, negative for a signal."""
        self._process = None
        with process:  # closes the pipes, waits
            return process.wait()
