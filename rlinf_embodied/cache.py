"""The cache of results that take long, such as warm starts and profiles."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlinf_embodied.errors import ConfigError

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


def require_writable(result: Path) -> None:
    """Checks that a result can be stored at a path in the cache, before it is made.

    Raises:
        ConfigError: it cannot.
    """
    try:
        result.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=result.parent) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise ConfigError(
            f"the cache {result.parent} cannot be written ({error.strerror}), and what is made would be lost: set "
            f"{_VARIABLE}=<a folder that can be written>"
        ) from error


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """Returns the path of a cached file or folder; `write` makes it where it is missing.

    It is written aside and renamed, so that processes that start together never see half of it.

    Raises:
        ConfigError: the cache cannot be written.
    """
    final = cache_root() / name
    if not final.exists():
        require_writable(final)
        with tempfile.TemporaryDirectory(dir=final.parent) as folder:
            write(aside := Path(folder) / final.name)
            with suppress(OSError):  # another process was faster
                aside.rename(final)
    return final
