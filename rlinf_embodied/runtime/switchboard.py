"""The driver's end of the workers' pulses: who is gone, who answers and what, and who is silent, and why.

    answers      a Beat
    silent       stopped   the process is stopped (SIGSTOP, a debugger)
                 held      it runs, but C code keeps the interpreter's lock; or it is on another machine
    gone         the connection ended without being told to

Only the driver's thread uses it: it reads what has arrived when it is asked, and no thread waits in between.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.runtime.heartbeat import Beat, Line

_CHUNK = 1 << 16


@dataclass(slots=True)
class Caller:
    """One worker's connection."""

    worker: int
    pid: int
    node: str
    line: socket.socket
    buffer: bytes = b""
    beat: Beat | None = None  # the newest
    answered: int = 0  # the number of the newest answer
    silent_since: float | None = None  # when it was first asked in vain
    gone: bool = False

    def __str__(self) -> str:
        """Returns, for example, "worker 2 (pid 4711, node-a)"."""
        return f"worker {self.worker} (pid {self.pid}, {self.node})"


@dataclass(slots=True)
class Switchboard:
    """Takes the workers' calls; `node` is the name of this machine, `host` the address where others reach it."""

    node: str
    host: str = "127.0.0.1"
    callers: dict[int, Caller] = field(default_factory=dict)
    _strangers: list[Caller] = field(default_factory=list)  # that have not said who they are
    _token: str = field(default_factory=lambda: secrets.token_hex(16))
    _asked: int = 0
    _listener: socket.socket = field(default_factory=socket.socket)

    def __post_init__(self) -> None:
        self._listener.bind((self.host, 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)

    def line(self, worker: int) -> Line:
        """Returns where a worker reports."""
        host, port = self._listener.getsockname()
        return Line(host, port, self._token, worker)

    def is_here(self, caller: Caller) -> bool:
        """Returns whether a worker runs on this machine."""
        return caller.node == self.node

    def gone(self) -> list[Caller]:
        """Returns the workers whose processes ended, as far as is known at this moment."""
        self._catch_up()
        return [caller for caller in self.callers.values() if caller.gone]

    def ask(self, within_s: float, stacks: Iterable[int] = ()) -> dict[int, Caller]:
        """Asks all workers what they do, with the stacks of some; returns all that have ever called, by number.

        Those that do not answer in time have `silent_since`; waits as long for them.
        """
        self._catch_up()
        self._asked += 1
        for caller in self.callers.values():
            self._tell(caller, {"ask": self._asked, "stack": caller.worker in set(stacks)})
        start = time.monotonic()
        while self._unanswered() and (left := start + within_s - time.monotonic()) > 0:
            self._read(left)
        for caller in self.callers.values():
            silent = caller in self._unanswered()
            caller.silent_since = (caller.silent_since or start) if silent else None
        return self.callers

    def abandon(self, attempt: int) -> None:
        """Tells all workers that calls of attempts before this one shall end."""
        self._catch_up()
        for caller in self.callers.values():
            self._tell(caller, {"abandon": attempt})

    def forget(self, worker: int) -> None:
        """Hangs up: the worker is ended on purpose."""
        caller = self.callers.pop(worker, None)
        if caller is not None:
            caller.line.close()

    def close(self) -> None:
        """Hangs up on everybody."""
        for worker in tuple(self.callers):
            self.forget(worker)
        self._listener.close()

    # ---------------------------------------------------------------------------------------------------- connections
    def _unanswered(self) -> list[Caller]:
        return [c for c in self.callers.values() if not c.gone and c.answered < self._asked]

    def _tell(self, caller: Caller, message: dict) -> None:
        with suppress(OSError):  # gone, or stopped for so long that its buffer is full: reading tells which
            caller.line.send(json.dumps(message).encode() + b"\n")

    def _catch_up(self) -> None:
        """Takes all that has arrived."""
        while self._read(0.0):
            pass

    def _read(self, within_s: float) -> bool:
        """Takes new connections or what they sent, waiting for the first of it; returns whether there was any."""
        with selectors.DefaultSelector() as lines:
            lines.register(self._listener, selectors.EVENT_READ, None)
            for caller in [*self.callers.values(), *self._strangers]:
                if not caller.gone:
                    lines.register(caller.line, selectors.EVENT_READ, caller)
            ready = lines.select(within_s)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)
        return bool(ready)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                line, _ = self._listener.accept()
                line.setblocking(False)
                self._strangers.append(Caller(-1, 0, "", line))

    def _receive(self, caller: Caller) -> None:
        try:
            data = caller.line.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            caller.gone = True
            if caller in self._strangers:
                self._strangers.remove(caller)
            return
        *texts, caller.buffer = (caller.buffer + data).split(b"\n")
        for text in texts:
            self._take(caller, text)

    def _take(self, caller: Caller, text: bytes) -> None:
        message = json.loads(text)
        if "answer" in message:
            caller.answered, caller.beat = message["answer"], Beat.from_dict(message["beat"])
        elif message.get("token") == self._token:
            self._strangers.remove(caller)
            caller.worker, caller.pid, caller.node = message["worker"], message["pid"], message["node"]
            self.callers[caller.worker] = caller
        else:
            self._strangers.remove(caller)
            caller.line.close()


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this machine is stopped; false where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
