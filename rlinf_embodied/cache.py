"""The cache of results that take long, such as warm starts and profiles."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlinf_embodied.errors import ConfigError

_LOG = logging.getLogger(__name__)
_PROBE_BYTES = 1 << 20  # a full disk still takes an empty file
_VARIABLE, _DEFAULT = "RLINF_EMBODIED_CACHE", "~/.cache/rlinf_embodied"


def cache_root(configured: str = _DEFAULT) -> Path:
    """Returns the cache's folder: RLINF_EMBODIED_CACHE, or else the configured one.

    Raises:
        ConfigError: it lies in the home folder, which is unknown.
    """
    chosen = os.environ.get(_VARIABLE, configured)
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the cache is {chosen!r}, but HOME is not set and this user has no home folder: set HOME, or "
            f"{_VARIABLE}=<a folder that can be written>"
        ) from error


def writable_place(cached: Path, spare: Path | None) -> Path:
    """Returns where a result goes that is about to be made: into the cache, below `spare` if that takes nothing.

    Raises:
        ConfigError: the cache cannot be written, and there is no `spare`.
    """
    if cached.exists():
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cached.parent) as probe:
            probe.write(bytes(_PROBE_BYTES))
        return cached
    except OSError as error:
        if spare is None:
            raise ConfigError(
                f"the cache {cached.parent} cannot be written ({error.strerror}), and what is made would be lost: set "
                f"{_VARIABLE}=<a folder that can be written>"
            ) from error
        place = spare / "cache" / cached.parent.name / cached.name
        if not place.exists():
            _LOG.warning("the cache %s cannot be written (%s): what is made goes to %s", cached.parent, error, place)
            place.parent.mkdir(parents=True, exist_ok=True)
        return place


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
