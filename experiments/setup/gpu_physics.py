"""On a machine with an NVIDIA GPU, reports a missing PhysX library for GPUs and how to install it by hand."""

from __future__ import annotations

import sys
from pathlib import Path

from envs.gpu_library import by_hand, library


def has_gpu() -> bool:
    """Returns whether the system knows an NVIDIA GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def main() -> int:
    """Prints one line where the library is missing, and returns 0: a CPU can simulate, too."""
    if has_gpu() and not library().exists():
        print(f"PhysX on GPUs: {library()} is missing; the first env on a GPU fetches it; without network: {by_hand()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
