"""A folder for derived files that are cheap to lose: decimated meshes, adapted shaders, compiled kinematics."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlinf_embodied.cache import cache_root
from rlinf_embodied.errors import ConfigError


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """Returns the path of a cached file or folder; `write` makes it where it is missing.

    It is written aside and renamed, so that processes that start together never see half of it.  Where the cache cannot
    be written (a read-only home, none at all), it is made anew in a temporary folder.
    """
    try:
        final = cache_root() / name
        if final.exists():
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=final.parent)) / final.name
    except (OSError, ConfigError):
        aside = Path(tempfile.mkdtemp()) / Path(name).name
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
