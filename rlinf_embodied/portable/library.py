"""Compiles kernels.c for this machine into a library whose symbols take precedence over torch's own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from functools import partial
from hashlib import sha256
from pathlib import Path

from rlinf_embodied.cache import cache_root, cached
from rlinf_embodied.errors import ConfigError

SOURCE = Path(__file__).with_name("kernels.c")
# No contraction: fused operations are written explicitly, so that bits depend neither on compiler nor on vector width.
_FLAGS = ("-std=gnu11", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-math-errno")
_LINKED = ("-fvisibility=hidden", "-shared", "-fPIC")
_LIBRARY, _DIGEST = "kernels.so", "sha256"


def compiled() -> Path:
    """Returns the shared library's path; compiles it unless a library of this source and compiler is cached.

    Raises:
        ConfigError: there is no C compiler, it cannot compile the source, or the cached file was modified.
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
        folder = cached(cache_root() / f"portable/{digest}", partial(_compile, command))
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
    path = folder / _LIBRARY
    subprocess.run([*command, "-o", str(path), str(SOURCE), "-ldl"], capture_output=True, check=True)
    (folder / _DIGEST).write_text(sha256(path.read_bytes()).hexdigest())
    for file in (path, folder / _DIGEST):
        file.chmod(0o644)


def is_trusted(path: Path) -> bool:
    """Returns whether this user compiled a library: only this user can write to it, and its digest matches.

    The path is predictable from source and compiler, so another user could have created the file first.
    """
    recorded = path.with_name(_DIGEST)
    try:
        stats = [stat.stat() for stat in (path.parent, path, recorded)]
        digest = recorded.read_text() == sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False
    return digest and all(stat.st_uid == os.geteuid() and not stat.st_mode & 0o022 for stat in stats)
