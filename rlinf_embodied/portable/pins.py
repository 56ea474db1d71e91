"""Pins instruction sets, by environment variables, and kernels, by kernels.c, before torch and numpy are imported.

driver   pin() sets the variables and loads the library; then the entry point imports torch
worker   starts with the driver's variables; LD_PRELOAD loads the library; verify() checks that torch uses it
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
    "ATEN_CPU_CAPABILITY": "avx2",  # ATen's own kernels, including Sleef's functions
    "MKL_CBWR": "COMPATIBLE",  # the remaining uses of MKL: LAPACK, the inverse error function
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # not used for float32 (kernels.c); for code that calls it directly
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # numpy: AVX2 at most
    "OPENBLAS_CORETYPE": "Haswell",  # numpy's matrix products
    "LP_NATIVE_VECTOR_WIDTH": "256",  # llvmpipe's images
}
_LIBRARY = "RLINF_PORTABLE_LIBRARY"  # path of the library; set in processes that must be pinned
_REQUIRED_FLAGS = ("avx2", "fma")


def pin() -> None:
    """Pins this process and the processes that it starts; a second call does nothing.

    Raises:
        ConfigError: the processor lacks AVX2, the library cannot be compiled, or torch or numpy is imported already.
    """
    if is_pinned():
        return
    _require_processor()
    path = library.compiled()
    late = [name for name in ("torch", "numpy") if name in sys.modules]  # they choose kernels at import
    if late:
        raise ConfigError(
            f"run.exact is 'portable', but {late[0]} is imported already, which fixes its kernels: call "
            "rlinf_embodied.portable.pin() before the first import of torch and numpy, or use run.exact=exact"
        )
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # libraries loaded later resolve to its symbols first
    os.environ.update(VARIABLES, **{_LIBRARY: str(path)})
    others = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    os.environ["LD_PRELOAD"] = ":".join([str(path), *others])


def is_pinned() -> bool:
    """Returns whether this process is pinned: its variables are set, and the library is loaded."""
    if any(os.environ.get(name) != value for name, value in VARIABLES.items()):
        return False
    return os.environ.get(_LIBRARY) is not None and hasattr(ctypes.CDLL(None), "rlinf_portable_version")


def require() -> None:
    """Checks that this process is pinned and that torch uses the library.

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
    """Returns the environment variables that pin a worker; {} if this process is not pinned."""
    if not is_pinned():
        return {}
    return {**VARIABLES, _LIBRARY: os.environ[_LIBRARY], "LD_PRELOAD": os.environ["LD_PRELOAD"]}


def verify() -> None:
    """Computes a product and checks that the library did it, if this process must be pinned; then it imports torch.

    Raises:
        ConfigError: torch does not call the library, or runs kernels other than AVX2.
    """
    if _LIBRARY not in os.environ:
        return
    import torch

    level, num_before = torch.backends.cpu.get_cpu_capability(), _num_products()
    torch.mm(torch.ones(9, 9), torch.ones(9, 9))
    uses_library = _num_products() > num_before
    if level != "AVX2" or not uses_library:
        raise ConfigError(
            f"run.exact is 'portable', but torch on {platform.node()} runs {level} kernels and "
            f"{'calls' if uses_library else 'does not call'} {os.environ[_LIBRARY]}: check that this file exists there "
            "and that torch is the version of constraints.txt, or use run.exact=exact"
        )


def describe() -> dict[str, object]:
    """Returns what is pinned, for a manifest: variables, kernels and the C library; {} if nothing is."""
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
    except OSError:  # not Linux, or an emulator: unsupported instructions fail there
        return
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    missing = [name for name in _REQUIRED_FLAGS if name not in flags]
    if missing:
        raise ConfigError(
            f"run.exact is 'portable', but this {platform.machine()} processor has no {' and no '.join(missing)}: it "
            "needs an x86-64 processor with AVX2 and FMA; use run.exact=exact"
        )
