"""Compiles accelerator/sim.cpp, once per source, compiler and torch: a minute, then there is a file to load."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "accelerator" / "sim.cpp"
FOLDER = SOURCE.parent / "build"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


def missing() -> str:
    """Returns why the simulated accelerator cannot be made here, an empty text if it can."""
    compiler = _compiler()[0]
    return "" if shutil.which(compiler) else f"needs a C++ compiler for the simulated accelerator: {compiler} is none"


def library() -> Path:
    """Returns the shared library."""
    torch_folder = Path(torch.__file__).parent
    command = [*_compiler(), *_FLAGS, f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    named = subprocess.run([*_compiler(), "--version"], capture_output=True, check=True).stdout
    parts = (SOURCE.read_bytes(), named, torch.__version__.encode(), " ".join(_FLAGS).encode())
    path = FOLDER / f"{sha256(bytes(0).join(parts)).hexdigest()[:16]}.so"
    FOLDER.mkdir(exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other test process waits for the minute that this takes
        if not path.exists():
            made = path.with_suffix(".new")
            libraries = ("-ltorch_cpu", "-lc10")
            subprocess.run([*command, "-o", str(made), str(SOURCE), *libraries], check=True)
            os.replace(made, path)
    return path


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))
