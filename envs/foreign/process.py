"""One process of a foreign simulator, seen from the env: started, asked, and never waited for without an end."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.foreign import wire
from envs.foreign.wire import Message
from rlinf_embodied.errors import HangError, SimulatorError

_LAST_LINES = 12
_CLOSE_S = 5.0


class Process:
    """A process behind a pipe; every question is answered within `timeout_s` seconds, or raises."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, advice: str
    ) -> None:
        """Starts it.

        Args:
            name: in messages, for example "LIBERO process 1 (rows 4-7)".
            command: what to run; it reads questions from its standard input and answers on its standard output.
            environment: its environment variables.
            timeout_s: how long an answer may take.
            advice: what to do where it dies or hangs.
        """
        self.name, self._timeout_s, self._advice = name, timeout_s, advice
        self._asked = "nothing yet"
        self._said = tempfile.NamedTemporaryFile(prefix="simulator_", suffix=".log")  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the run, which ends it in its own time
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, question: Message) -> None:
        """Sends a question; `answer` returns what it says.

        Raises:
            SimulatorError: it has died.
        """
        self._asked = question.kind
        try:
            wire.send(self._to, question)
        except BrokenPipeError as error:
            raise self._death() from error

    def answer(self) -> Message:
        """Returns the answer to the last question.

        Raises:
            SimulatorError: it died, or could not do what it was asked to.
            HangError: there was no answer in time.
        """
        try:
            message = wire.receive(self._from, self._timeout_s)
        except EOFError as error:
            raise self._death() from error
        except TimeoutError as error:
            raise HangError(
                f"{self.name}, pid {self.pid}, has not answered {self._asked!r} for {self._timeout_s:g} s: raise "
                f"env.options.timeout_s if the machine is that slow. {self._words()}"
            ) from error
        if message.kind == "error":
            raise SimulatorError(f"{self.name} failed in {self._asked!r}: {message.values['text']}")
        return message

    def close(self) -> None:
        """Ends it: at the end of its input it goes by itself, or is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _death(self) -> SimulatorError:
        code = self._process.wait()
        how = f"with code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
        memory = " (often the system's answer to too little memory)" if code == -signal.SIGKILL else ""
        return SimulatorError(
            f"{self.name}, pid {self.pid}, ended {how}{memory} when it was asked for {self._asked!r}: {self._advice}. "
            f"{self._words()}"
        )

    def _words(self) -> str:
        lines = Path(self._said.name).read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return "Its last words:\n  " + "\n  ".join(lines) if lines else "It said nothing"


def environment_of(repository: Path, gl: str) -> dict[str, str]:
    """Returns the environment variables of a process: this one's, with the repository alone on its path.

    Args:
        repository: the folder in which the package `envs` lies.
        gl: what MuJoCo renders with, where MUJOCO_GL does not say so: osmesa or egl.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "LP_NUM_THREADS"), "1")
    return {"MUJOCO_GL": gl, **threads, **kept, "PYTHONPATH": str(repository)}
