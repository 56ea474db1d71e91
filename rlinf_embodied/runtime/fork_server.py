"""Forks Ray's workers from a process that has already imported torch and the simulator, which saves seconds each.

    driver --start--> server: imports, then waits at a socket
    raylet --runs---> this file instead of Ray's setup_worker.py: passes a worker's command to the server, which forks

If the server is gone, or has other environment variables than the worker needs (for a GPU, or several threads), the
worker starts as usual in Ray.  This file imports the standard library only, since Ray runs it once per worker.  The
server must not import Ray, which reads a worker's variables when it is imported.  A forked process that cannot import
it then tells the driver through a pipe: Ray would keep starting others, without a message.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any, cast

VARIABLE = "RLINF_FORK_SERVER"  # in which a worker finds the server: its address, and a digest of its variables
_ANSWER_S = 50.0  # Ray gives a worker 60 s to start
_REQUEST_S, _REQUEST_BYTES = 5.0, 1 << 18
_BASE = ("torch", "google.protobuf.message", "jsonschema", "msgpack", "psutil", "yaml")  # the others are Ray's
_STREAMS = 3
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="  # arguments for setup_worker.py itself
_FAILURE = 2000  # characters of a failure, so that a pipe takes it as a whole
# ends of pipes: the server lives as long as the first is open; the second has the failures of its workers
_RUNNING: list[int] = []


def start(modules: Sequence[str], variables: Mapping[str, str]) -> None:
    """Starts the server of this process, which replaces an earlier one and ends with the process.

    Args:
        modules: the modules that the workers will need; those that they name in WORKER_IMPORTS are imported as well.
            An import that fails is left to the worker, which reports the error.
        variables: environment variables of its workers, in addition to those of this process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen(128)
        variables = {**os.environ, **variables}
        os.environ[VARIABLE] = f"{listener.getsockname().hex()} {_digest(variables)}"
        lifeline, held = os.pipe()
        failures, written = os.pipe()
        os.set_blocking(failures, False)
        passed = (listener.fileno(), lifeline, written)
        subprocess.Popen(
            [sys.executable, __file__, *map(str, passed), *_BASE, *modules],
            env=variables,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
        )
    os.close(lifeline)
    os.close(written)
    for old in _RUNNING:
        os.close(old)
    _RUNNING[:] = [held, failures]


def failure() -> str:
    """Returns why forked processes ended before they became workers, since the last call; "" if none did."""
    with suppress(BlockingIOError):  # nothing was written
        return os.read(_RUNNING[1], _REQUEST_BYTES).decode(errors="replace").partition("\n")[0] if _RUNNING else ""
    return ""


# --------------------------------------------------------------------------------------------------------- the server
def _serve(listener: socket.socket, lifeline: int, failures: int, modules: Sequence[str]) -> None:
    """Serves requests until the driver is gone; in a forked worker it returns when the worker is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the driver's terminal
    for name in modules:
        with suppress(Exception):
            for needed in getattr(importlib.import_module(name), "WORKER_IMPORTS", ()):
                importlib.import_module(needed)
    gc.freeze()  # a garbage collection in a worker would copy the memory pages of all imported modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while True:
        ready, _, _ = select.select([listener, lifeline], [], [])
        if lifeline in ready:
            return
        connection, _ = listener.accept()
        with connection:
            command = _take(connection)
            if command:
                break
    listener.close()
    os.close(lifeline)
    sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    try:
        importlib.import_module("ray")  # the first import of Ray's program
    except Exception as error:
        os.write(failures, _described(error).encode())
        raise
    os.close(failures)
    runpy.run_path(command[0], run_name="__main__")


def _described(error: Exception) -> str:
    """Returns one line with an error and the line that raised it."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    text = f"pid {os.getpid()}, cannot import ray: {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
    return " ".join(text.split())[:_FAILURE] + "\n"


def _take(connection: socket.socket) -> list[str]:
    """Forks the requested worker; returns its command in the worker, and [] in the server."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():  # anybody can connect to an abstract name
        return []
    connection.settimeout(_REQUEST_S)
    try:
        text, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, _STREAMS)
        request = json.loads(text)
        if not os.fork():
            _become(request, streams)
            return request["command"]
        connection.send(b"made")
        for stream in streams:
            os.close(stream)
    except (OSError, ValueError):  # it gave up
        pass
    return []


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Adopts the requesting process's variables, working directory and streams, in a new process group."""
    os.setsid()  # Ray ends the group of a worker with it
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["variables"])
    os.chdir(request["folder"])


# ------------------------------------------------------------------------------------------------- in place of a worker
def _has_forked(words: Sequence[str]) -> bool:
    """Requests a worker from the server, given Ray's arguments to setup_worker.py; returns whether it was forked."""
    command = [word for word in words if not word.startswith((_CONTEXT, _LANGUAGE))]
    context = next((json.loads(word.removeprefix(_CONTEXT)) for word in words if word.startswith(_CONTEXT)), {})
    added = {name: os.path.expandvars(value) for name, value in context.get("env_vars", {}).items()}
    variables = {**os.environ, **added}
    address, _, digest = variables.get(VARIABLE, "").partition(" ")
    if digest != _digest(variables):
        return False
    request = {"command": command, "variables": variables, "folder": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(bytes.fromhex(address))
            socket.send_fds(connection, [json.dumps(request).encode()], range(_STREAMS))
            return connection.recv(16) == b"made"
    except OSError:  # the server is gone, or not ready in time
        return False


def _digest(variables: Mapping[str, str]) -> str:
    """Returns a digest of a worker's variables without those that Ray adds, which no import of the server reads."""
    relevant = sorted(item for item in variables.items() if not item[0].startswith((VARIABLE, "RAY_", "SPT_NOENV")))
    return hashlib.sha256(repr(relevant).encode()).hexdigest()


def _main(words: Sequence[str]) -> None:
    if words[0].isdigit():
        listener, lifeline, failures = map(int, words[:3])
        return _serve(socket.socket(fileno=listener), lifeline, failures, words[3:])
    if not _has_forked(words):
        packages = cast(ModuleSpec, importlib.util.find_spec("ray")).submodule_search_locations or []
        runpy.run_path(os.path.join(packages[0], "_private/workers/setup_worker.py"), run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
