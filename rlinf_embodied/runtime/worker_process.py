"""What processes that Ray starts are started with, and what the driver tells Ray before it starts."""

from __future__ import annotations

import os
import sys

from rlinf_embodied import portable
from rlinf_embodied.device import is_accelerator

_DRIVER = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's default, 15, yields every core to whatever else runs
    "RAY_prestart_worker_first_driver": "0",  # no actor with separate variables can use them
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # every receipt is fetched, so every error is raised
}


def prepare_driver() -> None:
    """Sets the variables that Ray reads when this process starts or joins a cluster."""
    for name, value in _DRIVER.items():
        os.environ.setdefault(name, value)


def worker_variables(threads: int, device: str = "cpu") -> dict[str, str]:
    """Returns the environment of a worker process; on CPU cores it is pinned (portable/) if the driver is."""
    return task_variables(threads) | ({} if is_accelerator(device) else portable.worker_variables())


def task_variables(threads: int = 1) -> dict[str, str]:
    """Returns the environment of a process that computes nothing: it looks at a node, reads and writes files.

    One intra-op thread per worker: the same job ran 6-22 times slower when every process took every core.  Workers
    import from where the driver does, so that stages, envs and policies outside of the installed packages are found.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    return {name: str(threads) for name in names} | {"PYTHONPATH": os.pathsep.join(own)}
