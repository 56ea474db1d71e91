"""Processes that compare answers with math-verify, each question under hard limits.

    thread --[answer, reference]--> process (verifier_worker.py)      one question at a time
    thread <-------- 1 or 0 -------

The kernel ends a process that used up its processor time: its question counts as not equal.  A process that ends in any
other way is replaced and its question asked again, so that a killed process changes no result; a question that three
processes end at counts as not equal.  Processes end when the pipe to them is closed, also when their owner is killed.
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
from concurrent.futures import ThreadPoolExecutor

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.telemetry.progress import report_progress

_READY = b"ready\n"
_LOG = logging.getLogger(__name__)
_MOST_ENDS = 3  # of processes, at one question or at start-up
_START_S, _STUCK_S = 120.0, 60.0  # of wall time: only a process that does not run at all takes that long
_MEMORY_BYTES = 2 << 30


class VerifierPool:
    """Compares pairs of answers; processes start with the first question and stay.  One caller at a time."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        """Starts nothing yet.

        Args:
            num_workers: processes, at most.
            timeout_s: processor seconds that one question may take.
        """
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._idle: list[_Process] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that wait for a question."""
        return [process.pid for process in self._idle]

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns, for each (answer, reference) in order, whether math-verify takes them for the same.

        Raises:
            WorkerError: no process can be started.
        """
        if not pairs:
            return []
        results = []
        with ThreadPoolExecutor(min(self._num_workers, len(pairs)), "verifier") as threads:
            for found in threads.map(self._ask, pairs):
                results.append(found)
                report_progress()
        return results

    def close(self) -> None:
        """Ends all processes; the next question starts new ones."""
        while self._idle:
            process = self._idle.pop()
            process.kill()
            process.end()

    def _ask(self, pair: tuple[str, str]) -> bool:
        for number in range(_MOST_ENDS):
            try:
                process = self._idle.pop()
            except IndexError:
                process = self._started()
            reply = process.ask(json.dumps(pair).encode() + b"\n")
            if reply:
                self._idle.append(process)
                return reply == b"1\n"
            status, _ = process.end()
            if status == -signal.SIGPROF:
                _LOG.debug("an answer took more than %s s: %.200r", self._timeout_s, pair)
                break
            _LOG.warning("a verifier process ended with status %s (%d. time at this answer)", status, number + 1)
        return False

    def _started(self) -> _Process:
        status, words = 0, ""
        for _ in range(_MOST_ENDS):
            process = _Process(self._timeout_s)
            if process.read(_START_S) == _READY:
                return process
            status, words = process.end()
        raise WorkerError(
            f"verifier: {_MOST_ENDS} processes in a row ended while they started, the last one with status {status} "
            f"and the words {words!r}: install what is missing, or free memory"
        )


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


class _Process:
    """One process and its pipes."""

    def __init__(self, timeout_s: float) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlinf_embodied.reasoning.verifier_worker", str(timeout_s), str(_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the owner, which finishes its iteration
        )
        self.pid, self.kill = self._process.pid, self._process.kill

    def ask(self, line: bytes) -> bytes:
        """Sends a question and returns the reply, b"" where the process ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self.read(_STUCK_S)

    def read(self, most_s: float) -> bytes:
        """Returns the next line, b"" where the process ended; one that says nothing for so long is killed."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], most_s)[0]:
            self.kill()
        return self._process.stdout.readline()

    def end(self) -> tuple[int, str]:
        """Waits for a process that ended or was killed; returns its status, negative for a signal, and last words."""
        assert self._process.stdin is not None
        with self._process, contextlib.suppress(BrokenPipeError):  # closes the pipes, waits
            self._process.stdin.close()
        with self._errors as errors:
            errors.seek(0)
            return self._process.returncode, errors.read()[-500:].decode(errors="replace").strip()
