"""math-verify in a process, each question under hard limits.

    owner --[answer, reference]--> process (verifier_worker.py)      one question at a time
    owner <-------- 1 or 0 -------

The kernel ends a process that used up its processor time: its question counts as not equal.  A process that ends in any
other way is replaced and its question asked again, so that a killed process changes no result; a question that three
processes end at counts as not equal.  A process ends when the pipe to it is closed, also when its owner is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.telemetry.progress import report_progress

_LOG = logging.getLogger(__name__)
_MOST_ENDS = 3  # of processes, at one question or at start-up
_START_S, _STUCK_S = 120.0, 60.0  # of wall time: only a process that does not run at all takes that long


class MathVerifier:
    """Compares pairs of answers; its process starts with the first question and stays.  One caller at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Takes the processor seconds that one question may take; starts nothing yet."""
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the process, None where there is none."""
        return None if self._process is None else self._process.pid

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns, for each (answer, reference) in order, whether math-verify takes them for the same.

        Raises:
            WorkerError: no process can be started.
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
            process = self._process or self._start()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(question)  # pyright: ignore[reportOptionalMemberAccess]
                process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
            if reply := _line(process, _STUCK_S):
                return reply == b"1\n"
            status = self._end(process)[0]
            if status == -signal.SIGPROF:
                _LOG.debug("an answer took more than %s s: %.200r", self._timeout_s, question)
                break
            _LOG.warning("a verifier process ended with status %s (%d. time at this answer)", status, number + 1)
        return False

    def _start(self) -> subprocess.Popen[bytes]:
        status, words = 0, ""
        for _ in range(_MOST_ENDS):
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "rlinf_embodied.reasoning.verifier_worker", str(self._timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the owner, which finishes its iteration
            )
            if _line(process, _START_S) == b"ready\n":
                return process
            status, words = self._end(process)
        raise WorkerError(
            f"verifier: {_MOST_ENDS} processes in a row ended while they started, the last one with status {status} "
            f"and the words {words!r}: install what is missing, or free memory"
        )

    def _end(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Waits for a process that ended or was killed; returns its status, negative for a signal, and last words."""
        self._process = None
        with process, contextlib.suppress(BrokenPipeError):  # closes the pipes, waits
            process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        with self._errors as errors:
            errors.seek(0)
            return process.returncode, errors.read()[-500:].decode(errors="replace").strip()


def _line(process: subprocess.Popen[bytes], most_s: float) -> bytes:
    """Returns the next line, b"" where the process ended; one that says nothing for so long is killed."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], most_s)[0]:
        process.kill()
    return process.stdout.readline()


def _environment() -> dict[str, str]:
    """Returns all that a process sees of its owner's environment.

    What a model wrote goes through a parser and a computer algebra system there: tokens and passwords of the owner have
    no business in it.
    """
    needed = {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),  # this package, and math-verify
        "PYTHONHASHSEED": "0",  # the order of sets must not depend on the process
    }
    # an interpreter whose own libraries are found through this variable does not start without it
    return needed | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
