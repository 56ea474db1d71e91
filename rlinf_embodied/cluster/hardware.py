"""What this machine offers, as plain values: accelerators, or cores where there is no accelerator."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from rlinf_embodied.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind, numbered from 0; on a machine without accelerators a device is one core."""

    name: str
    kind: str  # "cuda" or "cpu"
    num_devices: int
    num_cores: int
    memory_bytes: int
    description: str = ""

    def torch_device(self, device: int) -> str:
        """Returns torch's name of a device as the worker that owns it sees it (a worker sees only its own GPU)."""
        return "cuda:0" if self.kind == "cuda" else "cpu"


def gpu_names() -> list[str]:
    """Returns the names of the visible NVIDIA GPUs, from the driver's own tool (importing torch takes seconds)."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names[: len(visible.split(","))] if visible else names


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def local_cluster(num_devices: int | None) -> Cluster:
    """Returns this machine as a cluster of `num_devices` devices (None: all of them).

    Raises:
        ConfigError: more GPUs are asked for than there are.
    """
    gpus, cores = gpu_names(), num_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = len(gpus) or cores
    if gpus and num_devices is not None and num_devices > len(gpus):
        raise ConfigError(
            f"cluster.num_devices is {num_devices}, but this machine has {len(gpus)} GPU(s): "
            f"use cluster.num_devices={len(gpus)} or a larger machine"
        )
    kind = "cuda" if gpus else "cpu"
    description = f"{len(gpus)} x {gpus[0]}" if gpus else f"{cores} cores"
    return Cluster("local", kind, num_devices or found, cores, memory, description)
