"""A Python process that answers lines with lines, and is replaced when it ends.

    owner --[line]--> process      one question at a time
    owner <--[line]-- process

A process that is killed is replaced and its question asked again, so that this changes no result.  It ends when the
pipe to it is closed, also when its owner is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rlinf_embodied.errors import WorkerError

_LOG = logging.getLogger(__name__)
_MOST_ENDS = 3  # of processes, at one question


class HelperProcess:
    """Starts with the first question and stays.  One caller at a time."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Takes its name for errors, the arguments of Python and all of its environment."""
        self._name, self._command, self._environment = name, [sys.executable, *arguments], dict(environment)
        if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some interpreters do not start without it
            self._environment["LD_LIBRARY_PATH"] = libraries
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> bytes | None:
        """Returns the reply to a line; None where the question used up its time (SIGPROF) or three processes ended.

        Raises:
            WorkerError: the process ended by itself, for example because it cannot import what it needs.
        """
        try:
            for number in range(_MOST_ENDS):
                if reply := self._reply(question):
                    return reply
                assert self._process is not None
                status = self._end(self._process)
                if status == -signal.SIGPROF:
                    break
                if status >= 0:
                    raise WorkerError(
                        f"the {self._name}'s process ended with status {status}: what it wrote above says why; install "
                        "what is missing"
                    )
                _LOG.warning("a %s process ended with status %s (time %d)", self._name, status, number + 1)
        except BaseException:
            self.close()  # its next reply would be to the question that was interrupted
            raise
        return None

    @property
    def pid(self) -> int | None:
        """Of the process; None where none runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        if self._process is not None:
            self._process.kill()
            self._end(self._process)

    def _reply(self, question: bytes) -> bytes:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            while question:
                question = question[os.write(process.stdin.fileno(), question) :]
        while not reply.endswith(b"\n"):
            if not (more := os.read(process.stdout.fileno(), 1 << 16)):
                return b""
            reply += more
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the owner, which finishes its iteration
        )

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for a process that ended or was killed; returns its status, negative for a signal."""
        self._process = None
        with process:  # closes the pipes, waits
            return process.wait()
