"""A lock file that names its holder, and that the kernel frees once its process is gone, however it ended."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO


class ProcessLock:
    """An exclusive lock on a file, which stays; between processes, and between two locks of one process."""

    def __init__(self, path: Path) -> None:
        """Takes nothing yet."""
        self._path = path
        self._file: TextIO | None = None

    def take(self) -> str | None:
        """Takes the lock; returns None, or who has it: "process 17 on alpha since 2026-01-31 12:00:00"."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with file:
                return file.read() or "a process that has just begun"
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        self._file = file
        return None

    def release(self) -> None:
        """Gives the lock back, if it is held."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None
