"""A measurement in a separate process: a command that runs to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf_embodied.errors import ConfigError, WorkerError
from rlinf_embodied.telemetry.run_reader import Run, read_run

REPOSITORY = Path(__file__).resolve().parents[3]


class Child:
    """A command that runs in the background and prints into a log."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it in the repository, which is first on its path.

        Args:
            name: what failures call it.
            command: its words; the first ones may be ("-m", module), for this process's Python.
            log: the file for what it prints.
            environment: variables in addition to this process's.
        """
        self.name, self.log = name, log
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        words = [sys.executable, *command] if command[0] == "-m" else list(command)
        variables = {**os.environ, "PYTHONPATH": paths, **(environment or {})}
        with log.open("w", encoding="utf-8") as out:
            self.process = subprocess.Popen(words, cwd=REPOSITORY, env=variables, stdout=out, stderr=out)

    def wait(self) -> float:
        """Waits for its end; returns the processor seconds of it and of those that it waited for.

        Raises:
            WorkerError: it failed.
        """
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = code = os.waitstatus_to_exitcode(status)
        if code:
            said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            raise WorkerError("\n".join([f"{self.name} ended with exit code {code}, see {self.log}:", *said]))
        return usage.ru_utime + usage.ru_stime

    def stop(self) -> None:
        """Asks one that still runs to end; `wait` returns then."""
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGTERM)


def trained_run(name: str, folder: Path, words: Sequence[str]) -> Run:
    """Returns the run of experiments/train_vla.py in a folder, which these words train now unless it is there.

    Raises:
        ConfigError: the folder has a training with other settings.
        WorkerError: the training failed; its log is named.
    """
    if not (folder / "summary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(REPOSITORY / "experiments/train_vla.py"), *words]
        Child(name, command, folder / "log.txt").wait()
    run = read_run(folder)
    if run.manifest["command"][1:] != list(words):
        raise ConfigError(f"{folder} holds a training with other settings: use another folder=, or remove it")
    return run
