"""A Python process that replies to one line at a time with a line, and is replaced when it is killed.

    owner --[line]--> process
    owner <--[line]-- process

After a replacement the request is repeated, so that a killed process changes no result.  The process ends when its pipe
is closed, which also happens if its owner is killed.
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
_MAX_ATTEMPTS = 3  # processes for one request


class HelperProcess:
    """The process starts with the first request, and serves further ones.  One caller at a time."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Takes a name for errors, the interpreter's arguments and all environment variables; starts nothing."""
        self._name, self._command, self._environment = name, [sys.executable, *arguments], dict(environment)
        if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some interpreters do not start without it
            self._environment["LD_LIBRARY_PATH"] = libraries
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> bytes | None:
        """Returns the reply to a line; None if it exceeded its time (SIGPROF), or three processes were killed.

        Raises:
            WorkerError: the process exited, for example because it cannot import a library.
        """
        try:
            for number in range(_MAX_ATTEMPTS):
                if reply := self._reply(request):
                    return reply
                assert self._process is not None
                status = self._end(self._process)
                if status == -signal.SIGPROF:
                    break
                if status >= 0:
                    raise WorkerError(
                        f"the {self._name}'s process ended with status {status}: its output above gives the reason; "
                        "install what is missing"
                    )
                _LOG.warning("a %s process ended with status %s (time %d)", self._name, status, number + 1)
        except BaseException:
            self.close()  # its next reply would be to the interrupted request
            raise
        return None

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the process; the next request starts another one."""
        if self._process is not None:
            self._process.kill()
            self._end(self._process)

    def _reply(self, request: bytes) -> bytes:
        """Returns the reply, or an empty text if the process ended."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            while request:
                request = request[os.write(process.stdin.fileno(), request) :]
        while not reply.endswith(b"\n"):
            if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                return b""
            reply += part
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C must reach the owner only, which finishes its iteration
        )

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for a process that ended or was killed; returns its status, negative for a signal."""
        self._process = None
        with process:  # closes the pipes, waits
            return process.wait()
