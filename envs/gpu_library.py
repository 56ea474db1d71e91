"""PhysX's library for GPUs, which is not part of SAPIEN's package: SAPIEN fetches it when it is first needed.

Where it looks and what it fetches: `enable_gpu` in sapien/physx/__init__.py (SAPIEN 3.0.3, lines 28-51).
"""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

from sapien import physx

from rlinf_embodied.errors import SimulatorError


def library() -> Path:
    """Returns where SAPIEN looks for the library."""
    name = "PhysXGpu_64.dll" if platform.system() == "Windows" else "libPhysXGpu_64.so"
    return Path.home() / ".sapien" / "physx" / physx.version() / name


def by_hand() -> str:
    """Returns instructions for a machine where SAPIEN cannot fetch the library."""
    on_arm = platform.machine() in ("aarch64", "arm64")
    archive = "windows-dll" if platform.system() == "Windows" else "linux-aarch64-so" if on_arm else "linux-so"
    return (
        f"on a machine with network take {archive}.zip of release {physx.version()} of "
        f"github.com/sapien-sim/physx-precompiled, and unzip it into {library().parent}, so that there is a "
        f"{library().name}"
    )


def enable_gpu_physics() -> None:
    """Loads PhysX's library for GPUs, or raises SimulatorError with instructions."""
    try:
        physx.enable_gpu()
    except RuntimeError as error:
        raise SimulatorError(
            f"env.backend=gpu cannot use PhysX in this process ({error}): build the first env on a GPU before any "
            "that a CPU simulates, or in another process"
        ) from error
    except (OSError, zipfile.BadZipFile) as error:  # requests' errors are OSErrors, as a loader's are
        action = "look at the driver (nvidia-smi)" if library().exists() else by_hand()
        raise SimulatorError(
            f"env.backend=gpu needs PhysX's library {library()}, which cannot be "
            f"{'loaded' if library().exists() else 'fetched'} ({type(error).__name__}: {error}): {action}, or use "
            "env.backend=batched"
        ) from error
