"""A lock file that says who holds it, and that is free once its process is gone, however it went.

The kernel opens the lock of a killed process; its name stays in the file.  A name from this machine is then that of a
process that is gone.  One from another machine may be that of a process that runs on: not every file system locks
across machines, so people have to say.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import TextIO

_LOG = logging.getLogger(__name__)
_UNKNOWN_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks
_HOLDER = re.compile(r"process (?P<process>\d+) on (?P<host>.+) since ")


class ProcessLock:
    """An exclusive lock on a file, which stays; between processes, and between two locks of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

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
            return f"{left}, a machine that cannot be asked from here: if that process is gone, remove {self._path}"
        return left if not is_locked and _is_running(int(match["process"])) else None

    def release(self) -> None:
        """Gives the lock back, if it is held."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
