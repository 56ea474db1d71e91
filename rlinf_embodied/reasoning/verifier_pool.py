"""A pool of processes that compare answers, each question under hard limits.

    caller --[answer, reference]--> worker process (math-verify)      one question at a time per worker
    caller <-------- 1 or 0 -------

The caller blocks until all questions are answered.  A worker that used up its processor time was ended by the kernel:
its question counts as not equal.  A worker that dies in any other way is replaced and its question asked again, so that
a killed process changes no result; a question that three workers die of counts as not equal.  Workers end when the pipe
to them is closed, thus also when their owner is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.telemetry.progress import report_progress

_READY = b"ready"
_LOG = logging.getLogger(__name__)
_MOST_DEATHS = 3  # of workers, at one question or at start-up
_START_S, _STUCK_S = 120.0, 60.0  # of the clock on the wall: only a worker that does not run at all takes that long
_MEMORY_BYTES = 2 << 30


@dataclass(slots=True)
class _Question:
    index: int
    line: bytes
    deaths: int = 0


class VerifierPool:
    """Compares pairs of answers; processes start with the first question and stay.  One caller at a time."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        """Starts nothing yet.

        Args:
            num_workers: processes, at most.
            timeout_s: processor seconds that one question may take.
        """
        assert num_workers >= 1
        assert timeout_s > 0
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that were started."""
        return [worker.pid for worker in self._workers]

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns, for each (answer, reference) in order, whether math-verify takes them for the same.

        Raises:
            WorkerError: no worker can be started.
        """
        results = [False] * len(pairs)
        waiting = deque(_Question(i, json.dumps(pair).encode() + b"\n") for i, pair in enumerate(pairs))
        try:
            while waiting or any(worker.question for worker in self._workers):
                self._hand_out(waiting)
                for worker in self._heard_from():
                    self._receive(worker, waiting, results)
                    report_progress()
        except BaseException:
            self.close()  # replies still under way would be taken for those of the next call
            raise
        return results

    def close(self) -> None:
        """Ends all processes; the next question starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _hand_out(self, waiting: deque[_Question]) -> None:
        """Gives a question to each worker without one, and starts workers while they are wanted."""
        self._workers = [worker for worker in self._workers if worker.question or worker.is_alive()]
        idle = [worker for worker in self._workers if worker.question is None]
        while waiting and (idle or len(self._workers) < self._num_workers):
            if not idle:
                idle.append(_Worker(self._timeout_s))
                self._workers.append(idle[-1])
            idle.pop().ask(waiting.popleft())

    def _heard_from(self) -> list[_Worker]:
        """Waits for replies or deaths; ends workers that did not get to run at all."""
        busy = [worker for worker in self._workers if worker.question]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            nearest_s = min(worker.deadline_s for worker in busy) - time.monotonic()
            heard = [key.data for key, _ in selector.select(max(nearest_s, 0.0))]
        for worker in busy:
            if worker not in heard and worker.deadline_s < time.monotonic():
                worker.kill()
        return heard

    def _receive(self, worker: _Worker, waiting: deque[_Question], results: list[bool]) -> None:
        question = worker.question
        assert question is not None
        for reply in worker.read():
            if reply == _READY:
                self._failed_starts = 0
            elif reply:
                results[question.index] = reply == b"1"
                worker.question = None
            else:
                self._workers.remove(worker)
                self._bury(worker, question, waiting)

    def _bury(self, worker: _Worker, question: _Question, waiting: deque[_Question]) -> None:
        """Decides what becomes of a dead worker's question: not equal, or asked again."""
        status = worker.end()
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == _MOST_DEATHS:
                self._failed_starts = 0
                raise WorkerError(
                    f"verifier: {_MOST_DEATHS} processes in a row ended while they started, the last one with status "
                    f"{status} and the words {worker.last_words!r}: install what is missing, or free memory"
                )
            waiting.append(question)
        elif status == -signal.SIGPROF:
            _LOG.debug("an answer took more than %s s: %.200r", self._timeout_s, question.line)
        else:
            question.deaths += 1
            _LOG.warning("a verifier process ended with status %s (%d. time at this answer)", status, question.deaths)
            if question.deaths < _MOST_DEATHS:
                waiting.append(question)


def _environment() -> dict[str, str]:
    """Returns all that a worker process sees of its owner's environment.

    What a model wrote goes through a parser and a computer algebra system there: tokens and passwords of the owner have
    no business beside it.
    """
    needed = {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),  # this package, and math-verify
        "PYTHONHASHSEED": "0",  # the order of sets must not depend on the process
    }
    # an interpreter whose own libraries are found through this variable does not start without it
    return needed | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


class _Worker:
    """One process, its pipes, and the question that it is at."""

    def __init__(self, timeout_s: float) -> None:
        """Starts the process; it takes questions at once and answers them when it is ready."""
        command = [sys.executable, "-m", "rlinf_embodied.reasoning.verifier_worker", str(timeout_s), str(_MEMORY_BYTES)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the owner, which finishes its iteration
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self.replies = self._process.stdin, self._process.stdout
        self._unread, self._closed = b"", False
        self.last_words = ""
        self.pid = self._process.pid
        self.question: _Question | None = None
        self.is_ready = False
        self.deadline_s = time.monotonic() + _START_S

    def is_alive(self) -> bool:
        """Returns whether the process still runs."""
        return self._process.poll() is None

    def ask(self, question: _Question) -> None:
        """Sends a question; that the process is dead shows when its reply is read."""
        self.question = question
        self.deadline_s = time.monotonic() + (_STUCK_S if self.is_ready else _START_S)
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(question.line)
            self._questions.flush()

    def read(self) -> list[bytes]:
        """Returns the replies that have arrived, one empty text where the process has ended."""
        piece = os.read(self.replies.fileno(), 4096)
        if not piece:
            self._closed = True
            return [b""]
        *replies, self._unread = (self._unread + piece).split(b"\n")
        if _READY in replies:
            self.is_ready = True
            self.deadline_s = time.monotonic() + _STUCK_S
        return replies

    def kill(self) -> None:
        """Ends the process now; its end shows when its reply is read."""
        self._process.kill()

    def end(self) -> int:
        """Ends the process if it still runs; returns its exit status, negative for a signal.

        One whose pipe was found closed is given the time to finish ending, so that the status tells what ended it.
        """
        if not self._closed:
            self._process.kill()
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        self.replies.close()
        self._errors.seek(0)
        self.last_words = self._errors.read()[-500:].decode(errors="replace").strip()
        self._errors.close()
        return status
