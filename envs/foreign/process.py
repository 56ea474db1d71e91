"""Links to rows: a process behind a pipe, or rows in this process.  A link answers one question at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path

from envs.foreign import wire
from envs.foreign.adapter import REPOSITORY
from envs.foreign.wire import Message
from envs.foreign.worker import Rows, offscreen_gl
from rlinf_embodied.errors import HangError, SimulatorError

_LAST_LINES = 12
_CLOSE_S = 5.0
_ADVICE = "use fewer rows (env.num_envs, eval.num_envs) or env.options.processes if memory is short"


class Local:
    """Rows in this process; errors are raised unchanged."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._question = rows, Message()

    def ask(self, question: Message) -> None:
        self._question = question

    def answer(self) -> Message:
        """Returns the answer to the last question."""
        return self._rows.run(self._question)

    def close(self) -> None:
        self._rows.close()


class Process:
    """A process behind a pipe.  It must answer a question within `timeout_s` seconds, or an error is raised."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        """Starts `command` with the file descriptor of its end of the pipe as an additional argument.

        `name` appears in messages, for example "LIBERO process 1 (rows 4-7)".
        """
        self.name, self._timeout_s, self._asked = name, timeout_s, "nothing yet"
        self._log = tempfile.NamedTemporaryFile(prefix="simulator_", suffix=".log")  # noqa: SIM115  closed in `close`
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C reaches only the run, which ends this process
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Message) -> None:
        """Sends a question, or raises SimulatorError if the process died."""
        self._asked = question["kind"]
        try:
            wire.send(self._pipe, question)
        except ConnectionError as error:
            raise self._exit_error() from error

    def answer(self) -> Message:
        """Returns the answer to the last question.

        Raises:
            SimulatorError: the process died, or reports an error.
            HangError: there was no answer in time.
        """
        try:
            message = wire.receive(self._pipe, self._timeout_s)
        except (EOFError, ConnectionError) as error:
            raise self._exit_error() from error
        except TimeoutError as error:
            raise HangError(
                f"{self.name}, pid {self.pid}, has not answered {self._asked!r} for {self._timeout_s:g} s: raise "
                f"env.options.timeout_s if the machine is that slow. {self._last_output()}"
            ) from error
        if message["kind"] == "error":
            raise SimulatorError(f"{self.name} failed in {self._asked!r}: {message['text']}")
        return message

    def close(self) -> None:
        """Ends the process: it exits when the pipe is closed, or is killed."""
        self._pipe.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _exit_error(self) -> SimulatorError:
        code = self._process.wait()
        exit_status = f"with code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
        memory = " (often because memory ran out)" if code == -signal.SIGKILL else ""
        return SimulatorError(
            f"{self.name}, pid {self.pid}, ended {exit_status}{memory} during {self._asked!r}: {_ADVICE}. "
            f"{self._last_output()}"
        )

    def _last_output(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return "Its last output:\n  " + "\n  ".join(lines) if lines else "It printed nothing"


def environment_of(*folders: Path) -> dict[str, str]:
    """Returns the environment variables of a simulator's process: this one's, with only these folders in PYTHONPATH."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "LP_NUM_THREADS"), "1")
    path = os.pathsep.join(map(str, dict.fromkeys((REPOSITORY, *folders))))
    return {"MUJOCO_GL": offscreen_gl(), **threads, **inherited, "PYTHONPATH": path}
