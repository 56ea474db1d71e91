"""Files of one node as plain values, so that they can be sent to another: listed, read in portions, written whole.

A path means the same on every node: what is sent lies at the same place there.  A file appears under its name when it
is complete; one that is there already, with the same size and time, is not sent again (so a shared file system costs
a listing and nothing else).
"""

from __future__ import annotations

import dataclasses
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.errors import DataError

PORTION_BYTES = 64 << 20  # of a file, in the object store at a time
_INCOMING = ".incoming"
_PATH_NAMES = ("path", "file", "files", "folder", "checkpoint", "data")  # or the end of a name


@dataclass(frozen=True, slots=True)
class Entry:
    """A file below a folder, or the file itself (path "")."""

    path: str
    size: int
    mtime_ns: int
    mode: int


def work_in(folder: str) -> None:
    """Makes the driver's working folder that of this process too: a relative path then means the same in both.

    Raises:
        DataError: this node cannot have a folder of that name.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise DataError(
            f"node {os.uname().nodename} cannot have the folder {folder} in which the run was started ({error}): start "
            "the run in a folder that every node can make, for example /tmp"
        ) from error


def listing(root: str) -> tuple[Entry, ...]:
    """Returns the files at or below a path, by name; () if there is nothing."""
    path = Path(root)
    files = [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())
    found = []
    for file in files:
        about = file.stat()
        name = "" if file == path else file.relative_to(path).as_posix()
        found.append(Entry(name, about.st_size, about.st_mtime_ns, stat.S_IMODE(about.st_mode)))
    return tuple(found)


def read(root: str, path: str, offset: int) -> NDArray[np.uint8]:
    """Returns a portion of a file below `root`."""
    with open(Path(root, path), "rb") as file:
        file.seek(offset)
        return np.frombuffer(file.read(PORTION_BYTES), np.uint8)


def write(root: str, entry: Entry, offset: int, content: NDArray[np.uint8]) -> None:
    """Writes a portion of a file below `root`; they come in their order, and with the last one the file is there.

    Raises:
        DataError: it cannot be written; names the path and this node.
    """
    target = Path(root, entry.path)
    aside = target.with_name(target.name + _INCOMING)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content.data)
        if offset + content.size == entry.size:
            os.utime(aside, ns=(entry.mtime_ns, entry.mtime_ns))
            aside.chmod(entry.mode)
            os.replace(aside, target)
    except OSError as error:
        raise DataError(
            f"node {os.uname().nodename} cannot write {target}, which the run needs there ({error.strerror}): let "
            "the run's user write it, or make it yourself"
        ) from error


def paths_in(config: object) -> list[Path]:
    """Returns the files and folders of this node that a configuration declares, relative ones made absolute.

    Declared are paths, and texts under a name that says that it is a path: `folder`, `checkpoint`, `teacher_folder`.
    Any other text may happen to be the name of something that is nobody else's business, such as a home folder.
    """
    found: dict[Path, None] = {}

    def look(value: object, declared: bool) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value, declared = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, False
        if isinstance(value, dict):
            for key, item in value.items():
                look(item, declared or str(key).rpartition("_")[2] in _PATH_NAMES)
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item, declared)
        elif isinstance(value, Path) or (declared and isinstance(value, str) and value):
            path = Path(value).absolute()
            if os.path.exists(path) and path not in (Path.cwd(), *Path.cwd().parents):
                found[path] = None

    look(config, declared=False)
    return list(found)
