"""A lock file that names its holder, and that is free once its process is gone, however it ended.

On one machine the kernel opens the lock of a killed process.  Not every file system locks across machines, so a lock is
a lease there: its holder renews the file's time while it runs, and a lease that was not renewed for a while is free.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_LOG = logging.getLogger(__name__)
_UNKNOWN_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks
_HOLDER = re.compile(r"process (?P<process>\d+) on (?P<host>.+) since ")
_RENEW_S = 10.0
_LEASE_S = 90.0  # far longer: file servers and busy machines are late


class ProcessLock:
    """An exclusive lock on a file, which stays; between processes, and between two locks of one process."""

    def __init__(self, path: Path) -> None:
        """Takes nothing yet."""
        self._path = path
        self._file: TextIO | None = None
        self._released = threading.Event()

    def take(self) -> str | None:
        """Takes the lock; returns None, or who has it: "process 17 on alpha since 2026-01-31 12:00:00".

        Raises:
            OSError: the file cannot be written.
        """
        file = self._path.open("a+", encoding="utf-8")
        try:
            holder = self._holder(file)
        except BaseException:
            file.close()
            raise
        if holder is not None:
            file.close()
            return holder
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        self._file = file
        self._released.clear()
        weakref.finalize(self, self._released.set)  # the thread holds no reference: a lock that is dropped is free
        arguments = (self._path, self._released)
        threading.Thread(target=_renew, args=arguments, name=f"lease of {self._path}", daemon=True).start()
        return None

    def _holder(self, file: TextIO) -> str | None:
        """Locks the file if the kernel lets it; returns who has it nevertheless."""
        is_locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            return file.read() or "a process that has just begun"
        except OSError as error:
            if error.errno not in _UNKNOWN_HERE:
                raise
            _LOG.warning("%s cannot be locked (%s): see to it that one process at a time uses it", self._path, error)
            is_locked = False
        file.seek(0)
        left = file.read()
        match = _HOLDER.match(left)
        if match is None:
            return None
        if match["host"] != socket.gethostname():
            free_in_s = _LEASE_S - self._age_s()
            expires = f"its lease ends in {free_in_s:.0f} s unless that process renews it; then give the command again"
            return f"{left}, another machine: {expires}" if free_in_s > 0 else None
        return left if not is_locked and _is_running(int(match["process"])) else None

    def _age_s(self) -> float:
        """Returns how long ago the lease was renewed, by the file system's own clock: machines' clocks differ."""
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".clock-") as now:
            return os.stat(now.name).st_mtime - self._path.stat().st_mtime

    def release(self) -> None:
        """Gives the lock back, if it is held."""
        if self._file is not None:
            self._released.set()
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _renew(path: Path, released: threading.Event) -> None:
    while not released.wait(_RENEW_S):
        with suppress(OSError):  # a file server that is away for a moment
            os.utime(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
