"""A measurement in a separate process: a command that runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf_embodied.errors import WorkerError

REPOSITORY = Path(__file__).resolve().parents[3]
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")


class Child:
    """A command that runs in the background and prints into a log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> None:
        """Starts it, with this repository first on its path.

        Args:
            name: what failures call it.
            command: its words; the first ones may be ("-m", module), for this process's Python.
            log: the file for what it prints.
            environment: variables in addition to this process's.
            cwd: where it runs.
        """
        self.name, self.log = name, log
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        words = [sys.executable, *command] if command[0] == "-m" else list(command)
        with log.open("w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                words, cwd=cwd, env={**os.environ, "PYTHONPATH": paths, **(environment or {})}, stdout=out, stderr=out
            )

    def check(self, code: int) -> None:
        """Takes the exit code.

        Raises:
            WorkerError: it is that of a failure.
        """
        if code:
            raise WorkerError(f"{self.name} ended with exit code {code}, see {self.log}:\n{last_lines(self.log)}")

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            WorkerError: it failed.
        """
        self.check(self.process.wait())

    def ended(self) -> float | None:
        """Returns the processor seconds of it and of those that it waited for once it has ended, None before.

        Raises:
            WorkerError: it failed.
        """
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.check(self.process.returncode)
        return usage.ru_utime + usage.ru_stime

    def stop(self) -> None:
        """Ends one that nobody waits for any more."""
        if self.process.returncode is None:
            self.process.terminate()
            self.process.wait()


def last_lines(log: Path, count: int = 5) -> str:
    """Returns the end of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:])
