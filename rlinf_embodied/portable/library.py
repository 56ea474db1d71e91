"""Compiles kernels.c for this machine and loads it in front of torch, whose symbols it then answers."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import partial
from hashlib import sha256
from pathlib import Path

from rlinf_embodied.cache import cached
from rlinf_embodied.errors import ConfigError

SOURCE = Path(__file__).with_name("kernels.c")
# No contraction: a fused operation is written where one is meant, so neither compiler nor vector width shows in a bit.
_FLAGS = ("-std=gnu11", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-math-errno")
_LINKED = ("-fvisibility=hidden", "-shared", "-fPIC")
_LIBRARY, _DIGEST = "kernels.so", "sha256"


def compiled() -> Path:
    """Returns the shared library's path; compiles it where this source or compiler is new, or the file was changed.

    Raises:
        ConfigError: there is no C compiler, or it refuses the source.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise ConfigError(
            f"run.exact is 'portable', but there is no C compiler {compiler[0]}: install one (Debian: apt-get install "
            "gcc libc6-dev), name it in CC, or use run.exact=exact"
        )
    command = [*compiler, *_FLAGS, *_LINKED]
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
        digest = sha256(b"\0".join([SOURCE.read_bytes(), " ".join(command).encode(), version])).hexdigest()[:16]
        folder = cached(f"portable/{digest}", partial(_compile, command))
        if not is_trusted(folder / _LIBRARY):
            folder = Path(tempfile.mkdtemp(prefix="rlinf-portable-")) / digest
            _compile(command, folder)
        return folder / _LIBRARY
    except subprocess.CalledProcessError as error:
        message = (error.stderr or b"").decode(errors="replace").strip()
        raise ConfigError(
            f"run.exact is 'portable', but {compiler[0]} does not compile {SOURCE.name} ({message}): use gcc or clang, "
            "named in CC, or run.exact=exact"
        ) from error


def _compile(command: list[str], folder: Path) -> None:
    folder.mkdir(mode=0o755)
    made = folder / _LIBRARY
    subprocess.run([*command, "-o", str(made), str(SOURCE), "-ldl"], capture_output=True, check=True)
    (folder / _DIGEST).write_text(sha256(made.read_bytes()).hexdigest())
    for path in (made, folder / _DIGEST):
        path.chmod(0o644)


def is_trusted(path: Path) -> bool:
    """Returns whether a library is what this user compiled: nobody else can have written it, and its digest is right.

    Its name follows from source and compiler, so that somebody else could put a file there first.
    """
    recorded = path.with_name(_DIGEST)
    try:
        found = [one.stat() for one in (path.parent, path, recorded)]
        if any(one.st_uid != os.geteuid() or one.st_mode & 0o022 for one in found):
            return False
        return sha256(path.read_bytes()).hexdigest() == recorded.read_text()
    except OSError:
        return False


def load(path: Path) -> None:
    """Loads the library so that libraries loaded later find its symbols before their own.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ConfigError(
            f"run.exact is 'portable', but {path} cannot be loaded ({error}): remove it, or use run.exact=exact"
        ) from error
