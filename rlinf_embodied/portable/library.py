"""Compiles kernels.c for this machine and loads it in front of torch, whose symbols it then answers."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from rlinf_embodied.cache import cache_root
from rlinf_embodied.errors import ConfigError

SOURCE = Path(__file__).with_name("kernels.c")
# No contraction: a fused operation is written where one is meant, so neither compiler nor vector width shows in a bit.
_FLAGS = ("-std=gnu11", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-math-errno")
_LINKED = ("-fvisibility=hidden", "-shared", "-fPIC")


def compiled() -> Path:
    """Returns the shared library's path; compiles it where this source or compiler is new.

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
        named = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
        digest = sha256(b"\0".join([SOURCE.read_bytes(), " ".join(command).encode(), named])).hexdigest()[:16]
        return _kept(f"{digest}.so", command)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise ConfigError(
            f"run.exact is 'portable', but {compiler[0]} does not compile {SOURCE.name} ({said}): use gcc or clang, "
            "named in CC, or run.exact=exact"
        ) from error


def _kept(name: str, command: list[str]) -> Path:
    """Returns the file in the cache, compiled if it is not there as this user left it; in a temporary folder if the
    cache cannot be written or belongs to somebody else."""
    try:
        root = cache_root() / "portable"
        root.mkdir(parents=True, exist_ok=True)
        if root.stat().st_uid == os.geteuid():
            root.chmod(0o755)
        if is_trusted(root / name):
            return root / name
        folder = Path(tempfile.mkdtemp(dir=root))
        if not _is_own(root):
            folder.rmdir()
            raise PermissionError(f"{root} belongs to another user")
    except (OSError, ConfigError):
        root = folder = Path(tempfile.mkdtemp(prefix="rlinf-portable-"))
    made = folder / name
    subprocess.run([*command, "-o", str(made), str(SOURCE), "-ldl"], capture_output=True, check=True)
    made.chmod(0o755)
    made.with_suffix(".sha256").write_text(sha256(made.read_bytes()).hexdigest())
    made.with_suffix(".sha256").chmod(0o644)
    for path in (made.with_suffix(".sha256"), made):
        os.replace(path, root / path.name)
    if folder != root:
        folder.rmdir()
    return root / name


def is_trusted(path: Path) -> bool:
    """Returns whether a library is what this user compiled: nobody else can have written it, and its digest is right.

    Its name follows from source and compiler, so that somebody else could put a file there first.
    """
    recorded = path.with_suffix(".sha256")
    try:
        if not all(_is_own(one) for one in (path.parent, path, recorded)):
            return False
        return sha256(path.read_bytes()).hexdigest() == recorded.read_text().strip()
    except OSError:
        return False


def _is_own(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def load(path: Path) -> ctypes.CDLL:
    """Loads the library so that libraries loaded later find its symbols before their own.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ConfigError(
            f"run.exact is 'portable', but {path} cannot be loaded ({error}): remove it, or use run.exact=exact"
        ) from error
