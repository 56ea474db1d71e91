"""Temporary folders that are cleared away by the next start where their process was killed.

    $TMPDIR/rlinf-abc123/owner         locked by the process that it belongs to, which it names
                         ray_session   the folder of the Ray that this process started, where it did

A killed process clears nothing, but the kernel opens its locks: a folder whose owner file can be locked is nobody's.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from rlinf_embodied.telemetry.process_lock import ProcessLock

_LOG = logging.getLogger(__name__)
_PREFIX, _OWNER, _RAY = "rlinf-", "owner", "ray_session"


class OwnFolder:
    """A temporary folder of this process."""

    def __init__(self) -> None:
        remove_leftovers(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.path = Path(self._folder.name)
        self._lock = ProcessLock(self.path / _OWNER)
        self._lock.take()

    def owns_ray(self, session_folder: str) -> None:
        """Notes the folder of a Ray that this process started: it goes with this one if the process is killed."""
        (self.path / _RAY).write_text(session_folder, encoding="utf-8")

    def cleanup(self) -> None:
        self._lock.release()
        self._folder.cleanup()


def remove_leftovers(root: Path) -> None:
    """Removes this user's folders below `root` whose process is gone, with the sessions of Ray that it had started."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid() or not (folder / _OWNER).read_text(encoding="utf-8"):
                continue  # another's, or just begun
            lock = ProcessLock(folder / _OWNER)
            if lock.take() is not None:
                continue
        except OSError:  # no folder of this form, or another start is removing it
            continue
        session = folder / _RAY
        ours = [folder] if not session.exists() else [Path(session.read_text(encoding="utf-8")), folder]
        for path in ours:
            shutil.rmtree(path, ignore_errors=True)
        lock.release()
        _LOG.info("removed %s, left by a process that was killed", ", ".join(map(str, ours)))
