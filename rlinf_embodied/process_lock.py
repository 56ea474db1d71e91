"""A lock file that says who holds it, and that the kernel opens when its process is gone, however it went."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TextIO

_LOG = logging.getLogger(__name__)
_UNKNOWN_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks


class ProcessLock:
    """An exclusive lock on a file, which stays; between processes, and between two locks of one process."""

    def __init__(self, path: Path) -> None:
        """Takes nothing yet."""
        self._path = path
        self._file: TextIO | None = None

    def take(self) -> str | None:
        """Takes the lock; returns None, or who has it: "process 17 on alpha since 2026-01-31 12:00:00".

        Raises:
            OSError: the file cannot be written.
        """
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read()
            file.close()
            return holder or "a process that has just begun"
        except OSError as error:
            if error.errno not in _UNKNOWN_HERE:
                file.close()
                raise
            _LOG.warning("%s cannot be locked (%s): see to it that one process at a time uses it", self._path, error)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        self._file = file
        return None

    def release(self) -> None:
        """Gives the lock back, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None
