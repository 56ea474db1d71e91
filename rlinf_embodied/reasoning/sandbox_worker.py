"""The process that runs programs for sandbox.py.  Needs Linux 5.14 or newer, and only Python's standard library.

    server       an unprivileged user without network; the root holds the system's programs and this Python, read-only
    +- watcher   one per program: starts it, enforces its limits, replies
       +- init      process 1 of the program's process namespace; when it is killed, the kernel kills all the others
       +- program   without capabilities and dangerous system calls; its /tmp is deleted with it

Each line in is a program as JSON, each line out its Result.  Each process is a fork of the one above, so that a program
starts in a warm interpreter.  The program's namespaces have no /proc and hide all other processes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import linecache
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator

_WARM = "bisect collections copy dataclasses datetime decimal fractions functools heapq itertools operator random re "
_WARM += "statistics string typing"  # modules that programs often import
_POLL_S = 0.05  # between two measurements of a program's processor time and memory
_NOBODY = 65534
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_ANY_NEW = 0x7E020000  # these namespaces, and those of host names and control groups
_READ_ONLY, _NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
# By machine: its number for seccomp, then system calls: clone; socket; memory beyond the limits (memfd_create shmget
# semget msgget mq_open); ptrace process_vm_readv process_vm_writev unshare setns add_key request_key keyctl bpf
# perf_event_open userfaultfd.
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, 41, 319, 29, 64, 68, 240, 101, 310, 311, 272, 308, 248, 249, 250, 321, 298, 323),
    "aarch64": (0xC00000B7, 220, 198, 279, 194, 190, 186, 180, 117, 270, 271, 97, 268, 217, 218, 219, 280, 241, 282),
}
_SAME_EVERYWHERE = (425, 438, 447)  # io_uring_setup pidfd_getfd memfd_secret
_CLONE3, _MOUNT_SETATTR, _X32 = 435, 442, 0x40000000
_ALLOW, _KILL, _FAIL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50000, 1, 38


def main() -> types.CodeType | None:
    """Serves until the owner closes the pipe; in a program's process it returns the code to execute."""
    requests, refusal = os.fdopen(0, "rb", closefd=False), None
    for name in _WARM.split():
        importlib.import_module(name)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        isolate(proc)
    except (OSError, KeyError) as error:
        refusal = json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode() + b"\n"
    gc.freeze()  # a collection in a program must not copy every page
    for line in requests:
        if refusal:
            os.write(1, refusal)
        elif not (watcher := os.fork()):
            return watch(proc, **json.loads(line))
        elif number := os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]):  # without a reply
            signal.raise_signal(-number) if number < 0 else sys.exit(number)
    return None


# ---------------------------------------------------------------------------------------------------------- the server
def isolate(proc: int) -> None:
    """Moves this process into separate namespaces, as a user without privileges.

    Raises:
        OSError: the machine does not allow it.
        KeyError: the system call numbers of this processor are unknown.
    """
    _filter(*_SYSTEM_CALLS[platform.machine()])
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # short of memory, the kernel kills programs first
    if is_root := not os.geteuid():
        _call("unshare", _NEWNS)
    else:
        _new_user(proc, _NEWNS)
    _new_root()
    if is_root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: otherwise root still owns its files in /proc
    _new_user(proc, _NEWNET | _NEWIPC)  # RLIMIT_NPROC counts processes per user namespace


def _new_user(proc: int, flags: int) -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEWUSER | flags)
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(content)


def _new_root() -> None:
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    python = [path for name in (sys.base_prefix, sys.prefix) for path in (name, os.path.realpath(name))]
    parts = {path: os.path.realpath(path) for path in (*_SYSTEM, *python) if os.path.isdir(path) and path != "/"}
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, b"mode=755,size=1m")
    os.mkdir("/tmp/old")
    _call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path, real in parts.items():
        if path in _SYSTEM and os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), path)
        elif not os.path.exists(path):
            os.makedirs(path)
            _call("mount", f"/old{real}".encode(), path.encode(), None, _BIND | _RECURSIVE, None)
            _restrict(path, _READ_ONLY | _NOSUID | _NODEV)
    os.mkdir("/tmp")
    os.mkdir("/dev")
    os.symlink("/tmp", "/dev/shm")
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        _call("mount", f"/old{path}".encode(), path.encode(), None, _BIND, None)
    _call("umount2", b"/old", 2)  # MNT_DETACH
    os.rmdir("/old")
    _restrict("/", _READ_ONLY | _NOSUID)


def _restrict(path: str, attributes: int) -> None:
    """Adds attributes to the mount at a path and to all mounts below it."""
    mount_attr = struct.pack("4Q", attributes, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, -100, path.encode(), 0x8000, mount_attr, len(mount_attr))  # AT_FDCWD, AT_RECURSIVE


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# --------------------------------------------------------------------------------------------------------- the watcher
def watch(proc: int, code: str, stdin: str, limits: dict[str, float]) -> types.CodeType:
    """Runs one program, replies and ends this process; in the program's process it returns the compiled code."""
    deadline_s, max_output = time.monotonic() + limits["wall_s"], int(limits["output_bytes"])
    _call("unshare", _NEWNS | _NEWPID)
    options = f"mode=700,nr_inodes=4096,size={limits['file_bytes']}"
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, options.encode())
    if not (init := os.fork()):
        _call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with the watcher
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.closerange(0, 1 << 20)
        while True:
            signal.pause()
    stdin_file = os.memfd_create("stdin")
    with open(stdin_file, "wb", closefd=False) as file:
        file.write(stdin.encode("utf-8", "replace"))
    os.lseek(stdin_file, 0, os.SEEK_SET)
    pipes = [os.pipe(), os.pipe()]
    if not (program := os.fork()):
        for number, descriptor in enumerate((stdin_file, pipes[0][1], pipes[1][1])):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 20)
        return confined(code, limits)
    outputs = {read: bytearray() for read, write in pipes if os.close(write) is None}
    status = _wait(proc, program, limits, deadline_s, outputs)
    os.kill(init, signal.SIGKILL)
    number = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])  # before init, which would reap it
    os.waitpid(init, 0)  # ends after all other processes of its namespace
    if status == "owner":
        os._exit(0)
    if number == -signal.SIGKILL and not status:  # killed from outside or by itself; the owner runs it again
        signal.raise_signal(signal.SIGKILL)
    if number == -signal.SIGXCPU:
        status = "cpu_s"
    for read, text in outputs.items():
        while len(text) <= max_output and (part := os.read(read, 1 << 16)):
            text += part
    if max(map(len, outputs.values())) > max_output:
        status = "output_bytes"
    stdout, stderr = (bytes(text[:max_output]).decode("utf-8", "replace") for text in outputs.values())
    status = status or ("ok" if number == 0 else f"exit {number}" if number > 0 else f"signal {-number}")
    with open(1, "wb", closefd=False) as replies:
        replies.write(json.dumps({"stdout": stdout, "stderr": stderr, "status": status}).encode() + b"\n")
    os._exit(0)


def _wait(proc: int, program: int, limits: dict[str, float], deadline_s: float, outputs: dict[int, bytearray]) -> str:
    """Waits for a program, and collects its output; returns the name of the exceeded limit, "" if it ended."""
    poll, ended, next_s = select.poll(), os.pidfd_open(program), time.monotonic() + _POLL_S
    for descriptor, events in ((0, 0), (ended, select.POLLIN), *((read, select.POLLIN) for read in outputs)):
        poll.register(descriptor, events)
    while True:
        for descriptor, _ in poll.poll(1000 * _POLL_S):
            if descriptor == ended:
                return ""
            if descriptor == 0:  # the owner ended: nothing waits for the result
                return "owner"
            if part := os.read(descriptor, 1 << 16):
                outputs[descriptor] += part
            else:
                poll.unregister(descriptor)
        if max(map(len, outputs.values())) > limits["output_bytes"]:
            return "output_bytes"
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + _POLL_S
            used_s, used_bytes = map(sum, zip(*_usage(proc, os.getpid()), strict=True))
            used = {"wall_s": now_s - deadline_s + limits["wall_s"], "cpu_s": used_s, "memory_bytes": used_bytes}
            for name, value in used.items():
                if value > limits[name]:
                    return name


def _usage(proc: int, parent: int) -> Iterator[tuple[float, int]]:
    """Yields processor seconds and resident bytes of all descendants of a process, after (0, 0)."""
    yield 0.0, 0
    try:
        tasks = os.open(f"{parent}/task", os.O_RDONLY, dir_fd=proc)
        names = os.listdir(tasks)
        os.close(tasks)
        for child in " ".join(_read(proc, f"{parent}/task/{name}/children") for name in names).split():
            stat = _read(proc, f"{child}/stat").rpartition(")")[2].split()
            yield sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK"), int(stat[21]) * resource.getpagesize()
            yield from _usage(proc, int(child))
    except (FileNotFoundError, ProcessLookupError):  # a process ended meanwhile
        return


def _read(proc: int, path: str) -> str:
    with open(os.open(path, os.O_RDONLY, dir_fd=proc)) as file:
        return file.read()


# --------------------------------------------------------------------------------------------------------- the program
def confined(code: str, limits: dict[str, float]) -> types.CodeType:
    """Drops all privileges of this process; returns the compiled program."""
    seconds, memory = math.ceil(limits["cpu_s"]), int(limits["memory_bytes"])
    others = 3  # server, watcher and init count as well
    for name, soft, hard in (
        ("CPU", seconds, seconds + 1),
        ("AS", memory, memory),
        ("NPROC", int(limits["processes"]) + others, int(limits["processes"]) + others),
        ("FSIZE", int(limits["file_bytes"]), int(limits["file_bytes"])),
        ("NOFILE", 64, 64),
        ("CORE", 0, 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
    os.chdir("/tmp")
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    content = _filter(*_SYSTEM_CALLS[platform.machine()])
    memory_of = ctypes.create_string_buffer(content)
    _call("prctl", 22, 2, struct.pack("HP", len(content) // 8, ctypes.addressof(memory_of)), 0, 0)  # PR_SET_SECCOMP
    sys.argv[:], sys.excepthook = ["program.py"], _print_error
    sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache["program.py"] = (len(code), None, code.splitlines(keepends=True), "program.py")
    return compile(code, "program.py", "exec")


def _filter(machine: int, clone: int, *refused: int) -> bytes:
    """Returns the seccomp program that makes the `refused` calls fail, and all calls that create a namespace."""
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, _KILL), (load, 0, 0, 0)]
    steps += [
        (at_least, 0, 1, _X32),
        (end, 0, 0, _FAIL | _ENOSYS),
        (equal, 0, 1, _CLONE3),
        (end, 0, 0, _FAIL | _ENOSYS),
    ]
    for number in (*refused, *_SAME_EVERYWHERE):
        steps += [(equal, 0, 1, number), (end, 0, 0, _FAIL | _EPERM)]
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _ANY_NEW), (end, 0, 0, _FAIL | _EPERM)]
    return b"".join(struct.pack("HBBI", *step) for step in (*steps, (end, 0, 0, _ALLOW)))


def _print_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__" and (program := main()) is not None:
    exec(program, sys.modules["__main__"].__dict__)
    if threading.active_count() == 1:  # skips the rest of Python's shutdown, which takes longer
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
