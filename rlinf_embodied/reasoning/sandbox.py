"""Runs Python programs that a model wrote, with isolation (sandbox_worker.py) and limits.

A program has no network and sees no other process and none of the owner's environment variables.  Its files are the
system's programs and Python, read-only, and a separate empty /tmp.  When it ends or reaches a limit, all processes that
it started are killed.  If the machine does not support this isolation, no program is run.
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
_ENVIRONMENT = {  # all environment variables of a program
    "HOME": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program, including all processes that it starts."""

    cpu_s: float = 2.0
    wall_s: float = 30.0  # far above cpu_s, so that a busy machine does not change a reward
    memory_bytes: int = 512 << 20  # resident memory of all processes; address space of each
    processes: int = 8  # including threads
    file_bytes: int = 16 << 20  # of each file, and of all files in /tmp
    output_bytes: int = 64 << 10  # of stdout and of stderr


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a program: Result("", "Traceback ... ZeroDivisionError: division by zero\\n", "exit 1")."""

    stdout: str
    stderr: str
    status: str  # "ok", "exit 1", "signal 11", or the exceeded limit, such as "cpu_s"


class Sandbox:
    """Runs programs; may be shared by threads.

    Each running program has a separate server process.  Servers are reused, and end with their owner.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        """Starts a server and runs a test program.

        Raises:
            ConfigError: the machine cannot isolate programs, or the limits are too small.
        """
        self._limits = asdict(limits)
        self._idle: list[HelperProcess] = []
        result = self.run("print(1)")
        if result.stdout != "1\n":
            raise ConfigError(
                f"the sandbox cannot run a program that prints 1 ({result.status}: {result.stderr.strip()}): use "
                "larger Limits"
            )

    def run(self, code: str, stdin: str = "") -> Result:
        """Runs a program as `python program.py` would.

        Raises:
            ConfigError: the machine cannot isolate programs.
            WorkerError: the server failed.
        """
        request = {"code": code, "stdin": stdin, "limits": self._limits}
        with self._server() as server:
            reply = server.ask(json.dumps(request).encode() + b"\n")
        result = {"stdout": "", "stderr": "", "status": "signal 9"} if reply is None else json.loads(reply)
        if reason := result.get("refused"):
            raise ConfigError(
                f"programs of a model cannot be isolated on this machine ({reason}), so none is run: use Linux 5.14 "
                "or newer on x86-64 or ARM and allow user namespaces (sysctl user.max_user_namespaces=10000; on Debian "
                "kernel.unprivileged_userns_clone=1; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), in a "
                "container also by `docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined`"
            )
        return Result(**result)

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
        self._idle.append(server)  # not after an error, in which case HelperProcess has ended its process
