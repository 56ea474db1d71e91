"""The cache of results that take long, such as warm starts and profiles."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
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


def cached(final: Path, write: Callable[[Path], object], marker: str = "") -> Path:
    """Returns the path of a cached file or folder, which `write` makes if it, or the file `marker` in it, is missing.

    It is written to a temporary path and renamed when it is on the disk, so that no process finds half of it.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if (final / marker).exists():
        return final
    require_writable(final)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f"{final.name}.partial-") as folder:
        write(partial := Path(folder) / final.name)
        open_to_all(partial)
        for path in (*partial.rglob("*"), partial):  # contents must reach the disk before their names
            sync(path)
        try:
            if not (final / marker).exists():
                shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            sync(final.parent)
        except OSError:
            if not (final / marker).exists():  # otherwise another process made it in the meantime
                raise
    return final


def open_to_all(folder: Path) -> None:
    """Gives files the permissions of the umask, since safetensors only lets the owner read them."""
    mask = os.umask(0o077)  # the only way to read it
    os.umask(mask)
    for path in folder.rglob("*.safetensors"):
        if path.stat().st_nlink == 1:  # a linked file may belong to another user
            path.chmod(0o666 & ~mask)


def sync(path: Path) -> None:
    """Waits until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
