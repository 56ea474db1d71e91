"""Runs Python programs that a model wrote, isolated and under limits; sandbox_worker.py isolates them.

A program has no network, and sees no file but the system's programs and Python itself, read-only, and an empty /tmp of
its own; no other process, and no variable of the owner's environment.  When it ends or reaches a limit, all processes
that it started are killed.  Where the machine cannot do this, nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.helper_process import HelperProcess

_WORKER = Path(__file__).with_name("sandbox_worker.py")
_ENVIRONMENT = {  # all that a program sees
    "HOME": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use, with all processes that it starts."""

    cpu_s: float = 2.0
    wall_s: float = 30.0  # far above cpu_s: a busy machine must not change what a program earns
    memory_bytes: int = 512 << 20  # resident; of each process: address space
    processes: int = 8  # and threads
    file_bytes: int = 16 << 20  # of one file, and of all in /tmp
    output_bytes: int = 64 << 10  # of stdout and of stderr


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a program: Result("", "Traceback ... ZeroDivisionError: division by zero\\n", "exit 1")."""

    stdout: str
    stderr: str
    status: str  # "ok", "exit 1", "signal 11"; or the limit that it reached, such as "cpu_s"


class Sandbox:
    """Runs programs; threads may share it, each running program has a server process of its own.

    A server is started once and serves further programs; it ends with its owner.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        """Starts a server and tries it.

        Raises:
            ConfigError: the machine cannot isolate programs.
        """
        self._limits = asdict(limits)
        self._idle: list[HelperProcess] = []
        tried = self.run("print(1)")
        if tried.stdout != "1\n":
            raise ConfigError(
                f"the sandbox cannot run a program that prints 1 ({tried.status}: {tried.stderr.strip()}): use larger "
                "Limits"
            )

    def run(self, code: str, stdin: str = "") -> Result:
        """Runs a program as `python program.py` would; any number of threads at once.

        Raises:
            ConfigError: the machine cannot isolate programs.
            WorkerError: the server failed.
        """
        question = {"code": code, "stdin": stdin, "limits": self._limits}
        with self._server() as server:
            reply = server.ask(json.dumps(question).encode() + b"\n")
        found = {"stdout": "", "stderr": "", "status": "signal 9"} if reply is None else json.loads(reply)
        if refused := found.get("refused"):
            raise ConfigError(
                f"programs of a model cannot be isolated on this machine ({refused}), so none is run: use Linux 5.14 "
                "or newer on x86-64 or ARM and allow user namespaces (sysctl user.max_user_namespaces=10000; on Debian "
                "kernel.unprivileged_userns_clone=1; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), in a "
                "container also by `docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined`"
            )
        return Result(**found)

    def close(self) -> None:
        """Ends the servers; the next program starts one."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _server(self) -> Iterator[HelperProcess]:
        try:
            server = self._idle.pop()
        except IndexError:
            server = HelperProcess("sandbox", ("-sP", str(_WORKER)), _ENVIRONMENT)
        yield server
        self._idle.append(server)  # after an error it has closed its process
