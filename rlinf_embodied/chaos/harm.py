"""What is done to processes, to Ray's store and to its nodes."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import ray
from ray.cluster_utils import Cluster

from rlinf_embodied.chaos.settings import STORE_BYTES

FULL_S = 3.0  # for which the disk or the store is full


def later(seconds: float, work: Callable[[], None]) -> None:
    """Does something after a while, unless the program has ended."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def allow_files(pid: int, num_bytes: int | None) -> None:
    """Limits the size of the files that a process writes: 0 lets all writes fail, as on a full disk; None: none."""
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if num_bytes is None else num_bytes, most))


def fill_store(num_bytes: int, seconds: float) -> None:
    """Puts as much into the driver's object store as it holds, for a while."""
    piece = num_bytes // 8
    pieces = [ray.put(np.zeros(piece, dtype=np.uint8)) for _ in range(8)]
    later(seconds, pieces.clear)


@contextmanager
def two_nodes() -> Iterator[tuple[str | None, Callable[[], None]]]:
    """A Ray cluster of two nodes in this machine: its address, and what ends the second one."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        os.environ["RAY_TMPDIR"] = folder
        nodes = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES},
            shutdown_at_exit=False,
        )
        try:
            second = nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
            yield nodes.address, lambda: nodes.remove_node(second, allow_graceful=False)
        finally:
            ray.shutdown()
            nodes.shutdown()
            del os.environ["RAY_TMPDIR"]
