"""What is pinned, before torch and numpy are imported: instruction sets by variables, the rest by kernels.c.

driver   pin(): sets the variables and loads the library, then the entry point imports torch
worker   starts with the driver's variables; LD_PRELOAD loads the library;  verify() sees that it is in use
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.portable import library

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",  # ATen's own kernels, Sleef's functions inside them included
    "MKL_CBWR": "COMPATIBLE",  # what is left of MKL: LAPACK, the inverse error function
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # not used for float32 (kernels.c); for code that calls it directly
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # numpy: AVX2 at most
    "OPENBLAS_CORETYPE": "Haswell",  # numpy's products
    "LP_NATIVE_VECTOR_WIDTH": "256",  # llvmpipe's images
}
_LIBRARY = "RLINF_PORTABLE_LIBRARY"  # says to a process that it is to be pinned, and with what
_NEEDED = ("avx2", "fma")


def pin() -> None:
    """Pins this process and all that it starts; a second call does nothing.

    Raises:
        ConfigError: the processor, the compiler or the order of imports does not allow it.
    """
    if is_pinned():
        return
    _require_processor()
    path = library.compiled()
    late = [name for name in ("torch", "numpy") if name in sys.modules]  # they choose when they are imported
    if late:
        raise ConfigError(
            f"run.exact is 'portable', but {late[0]} is imported already and keeps the kernels that it chose: call "
            "rlinf_embodied.portable.pin() before the first import of torch and numpy, or use run.exact=exact"
        )
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # libraries that are loaded later find its symbols before their own
    os.environ.update(VARIABLES, **{_LIBRARY: str(path)})
    others = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    os.environ["LD_PRELOAD"] = ":".join([str(path), *others])


def is_pinned() -> bool:
    """Returns whether this process runs with the pins: its variables say so, and the library is loaded."""
    if any(os.environ.get(name) != value for name, value in VARIABLES.items()):
        return False
    return os.environ.get(_LIBRARY) is not None and hasattr(ctypes.CDLL(None), "rlinf_portable_version")


def require() -> None:
    """Checks that this process is pinned, and computes by it.

    Raises:
        ConfigError: it is not.
    """
    if not is_pinned():
        raise ConfigError(
            "run.exact is 'portable', but this process is not pinned: start it by experiments/train_*.py, call "
            "rlinf_embodied.portable.pin() before the first import of torch and numpy, or use run.exact=exact"
        )
    verify()


def worker_variables() -> dict[str, str]:
    """Returns what a worker of this process starts with; nothing where this process is not pinned."""
    if not is_pinned():
        return {}
    return {**VARIABLES, _LIBRARY: os.environ[_LIBRARY], "LD_PRELOAD": os.environ["LD_PRELOAD"]}


def verify() -> None:
    """Makes a product and sees that it was ours, where this process is to be pinned; imports torch then.

    Raises:
        ConfigError: the library is not in front of torch, or torch runs other kernels.
    """
    if _LIBRARY not in os.environ:
        return
    import torch

    level, before = torch.backends.cpu.get_cpu_capability(), _num_products()
    torch.mm(torch.ones(9, 9), torch.ones(9, 9))
    asks = _num_products() > before
    if level != "AVX2" or not asks:
        raise ConfigError(
            f"run.exact is 'portable', but torch on {platform.node()} runs {level} kernels and "
            f"{'asks' if asks else 'does not ask'} {os.environ[_LIBRARY]}: see that this file exists there and that "
            "torch is the version of constraints.txt, or use run.exact=exact"
        )


def describe() -> dict[str, object]:
    """Returns what is pinned, for a manifest: variables, library and the C library; {} where nothing is."""
    if not is_pinned():
        return {}
    path = Path(os.environ[_LIBRARY])
    return {"variables": VARIABLES, "kernels": path.parent.name, "libc": " ".join(platform.libc_ver())}


def _num_products() -> int:
    count = getattr(ctypes.CDLL(None), "rlinf_portable_products", None)
    return 0 if count is None else int(count())


def _require_processor() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # an emulator, which says itself what it cannot do
        return
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    missing = [name for name in _NEEDED if name not in flags]
    if missing:
        raise ConfigError(
            f"run.exact is 'portable', but this {platform.machine()} processor has no {' and no '.join(missing)}: it "
            "needs an x86-64 processor with AVX2 and FMA; use run.exact=exact"
        )
