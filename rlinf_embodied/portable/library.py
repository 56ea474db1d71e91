"""Compiles kernels.c for this machine: a library whose symbols torch finds before its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
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
    """Returns the shared library's path; compiles it where this source or compiler is new.

    Raises:
        ConfigError: there is no C compiler, it refuses the source, or the compiled file was changed since.
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
    except subprocess.CalledProcessError as error:
        message = (error.stderr or b"").decode(errors="replace").strip()
        raise ConfigError(
            f"run.exact is 'portable', but {compiler[0]} does not compile {SOURCE.name} ({message}): use gcc or clang, "
            "named in CC, or run.exact=exact"
        ) from error
    if not is_trusted(folder / _LIBRARY):
        raise ConfigError(
            f"run.exact is 'portable', but {folder / _LIBRARY} is not what was compiled for you: remove {folder}, or "
            "use run.exact=exact"
        )
    return folder / _LIBRARY


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
        digest = recorded.read_text() == sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False
    return digest and all(one.st_uid == os.geteuid() and not one.st_mode & 0o022 for one in found)
