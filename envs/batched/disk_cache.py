"""A folder for derived files that are cheap to lose: decimated meshes, adapted shaders, compiled kinematics."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_FALLBACK = "~/.cache/rlinf_embodied"


def cache_folder() -> Path:
    """Returns the folder RLINF_EMBODIED_CACHE, or ~/.cache/rlinf_embodied."""
    return Path(os.environ.get("RLINF_EMBODIED_CACHE", _FALLBACK)).expanduser()


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """Returns the path of a cached file or folder; `write` makes it where it is missing.

    It is written aside and renamed, so that processes that start together never see half of it.  Where the cache cannot
    be written (a read-only home), it is made anew in a temporary folder.
    """
    final = cache_folder() / name
    if final.exists():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=final.parent)) / final.name
    except OSError:
        aside = Path(tempfile.mkdtemp()) / final.name
        write(aside)
        return aside
    try:
        write(aside)
    except BaseException:
        shutil.rmtree(aside.parent, ignore_errors=True)
        raise
    try:
        aside.rename(final)
        aside.parent.rmdir()
    except OSError:  # another process was faster
        return aside if not final.exists() else final
    return final
