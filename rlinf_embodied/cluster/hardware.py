"""Describes the available devices as plain values: accelerators, or CPU cores on machines without accelerators."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError

EMULATED = "emulated"  # torch device of emulated clusters, whose stages sleep instead of computing
WAITING = "waiting"  # kind of devices that own no core: workers for stages that mostly wait, such as for a remote env
RAY_GPUS = ("cuda",)  # kinds that Ray schedules as GPUs: a worker sees only its own device, with index 0
_MEMORY_LIMITS = tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
_SHARED_MEMORY = Path("/dev/shm")
_STORE_SHARE, _SHARED_SHARE = 0.3, 0.9  # of the host's memory, and of its free shared memory
_MIN_STORE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Identical nodes, or the devices of one kind in them."""

    kind: str  # of the devices: "cpu", "h100", ...
    num_nodes: int
    devices_per_node: int
    memory_bytes: float  # of each device
    cores_per_node: int
    beside: int | None = None  # index of the earlier group whose nodes hold these devices; None: separate nodes
    speed: float = 1.0  # of each device, relative to other devices of its kind

    @property
    def on_host(self) -> bool:
        """Whether the devices are CPU cores or waiting workers, not accelerators."""
        return self.kind in ("cpu", WAITING)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def cores_per_device(self) -> float:
        return self.cores_per_node / self.devices_per_node


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a device: Place(group, node=2, index=1) is the second device of the third node."""

    group: NodeGroup
    node: int  # counted over all groups
    index: int  # within the node


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Transfer rates between devices, and the driver's cost per call."""

    within_node_bytes_per_s: float = 4.0e9
    across_nodes_bytes_per_s: float = 1.0e9
    latency_s: float = 0.001
    submit_s: float = 0.0005  # driver time per submitted call


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices numbered from 0, group by group and node by node; without accelerators each device is one core."""

    name: str
    kind: str  # torch's name of its devices: "cuda", "cpu", ...
    num_devices: int
    num_cores: int
    memory_bytes: int
    description: str = ""
    groups: tuple[NodeGroup, ...] = ()  # (): one node with all of the above
    links: Links = Links()
    emulated: bool = False  # stages sleep instead of computing
    device_module: str | None = None  # registers the kind with torch, see device.py
    nodes: tuple[str, ...] = ()  # Ray's id of each node, in the order of the groups; (): this machine only

    def node_groups(self) -> tuple[NodeGroup, ...]:
        """Returns the groups of identical nodes, in the order of device numbers."""
        if self.groups:
            return self.groups
        number, memory = self.num_devices, self.memory_bytes / (self.num_devices if self.kind == "cpu" else 1)
        counts = {"num_nodes": 1, "devices_per_node": number, "cores_per_node": max(self.num_cores, number)}
        return (NodeGroup(kind=self.kind, memory_bytes=memory, **counts),)

    @property
    def num_computing(self) -> int:
        """Number of devices that can run any stage: excludes cores next to accelerators, and waiting workers."""
        return sum(group.num_devices for group in self.node_groups() if not self._is_other(group))

    def _is_other(self, group: NodeGroup) -> bool:
        """Returns whether a group adds devices of another kind to the nodes of an earlier group."""
        return group.beside is not None and group.kind != self.node_groups()[group.beside].kind

    @property
    def cores_beside(self) -> tuple[int, ...]:
        """The devices that are cores of accelerator nodes, for stages that run only on CPUs."""
        groups = zip(self.node_groups(), self.group_devices(), strict=True)
        return tuple(k for group, devices in groups if self._is_other(group) and group.kind == "cpu" for k in devices)

    def group_devices(self) -> tuple[range, ...]:
        groups = self.node_groups()
        ends = accumulate(group.num_devices for group in groups)
        return tuple(range(end - group.num_devices, end) for group, end in zip(groups, ends, strict=True))

    def place_of(self, device: int) -> Place:
        first_nodes: list[int] = []  # the first node of each group so far
        num_before: Counter[tuple[int | None, str]] = Counter()  # devices per node so far, by (owner, kind)
        next_node = 0
        for group, devices in zip(self.node_groups(), self.group_devices(), strict=True):
            first_nodes.append(next_node if group.beside is None else first_nodes[group.beside])
            if device in devices:
                node, index = divmod(device - devices.start, group.devices_per_node)
                return Place(group, first_nodes[-1] + node, index + num_before[group.beside, group.kind])
            next_node += group.num_nodes if group.beside is None else 0
            owner = len(first_nodes) - 1 if group.beside is None else group.beside
            num_before[owner, group.kind] += group.devices_per_node
        raise AssertionError(f"device {device} lies beyond the {self.num_devices} devices of cluster {self.name}")

    def node_id(self, device: int) -> str | None:
        """Returns Ray's id of a device's node; None if the cluster is only this machine."""
        return self.nodes[self.place_of(device).node] if self.nodes else None

    def torch_device(self, device: int) -> str:
        """Returns torch's name for a device within the worker that owns it."""
        if self.emulated:
            return EMULATED
        place = self.place_of(device)
        if self.kind == "cpu" or place.group.on_host:
            return "cpu"
        return f"{self.kind}:{0 if self.kind in RAY_GPUS else place.index}"


def gpus() -> list[tuple[str, int]]:
    """Returns (name, memory in bytes) of each visible NVIDIA GPU, from nvidia-smi (importing torch takes seconds).

    If the driver reports no memory, the GPU shares its host's, whose size is returned.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or visible == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    devices = []
    for line in result.stdout.splitlines() if result.returncode == 0 else ():
        name, _, reported = (part.strip() for part in line.rpartition(","))  # in MiB, or "[N/A]"
        devices.append((name, int(reported) << 20 if reported.isdigit() else host_memory_bytes()))
    if visible is None:
        return devices
    visible_ids = [text.strip() for text in visible.split(",")]
    return (
        [devices[int(n)] for n in visible_ids if int(n) < len(devices)]
        if all(map(str.isdigit, visible_ids))
        else devices[: len(visible_ids)]
    )


def require_one_model(devices: Sequence[tuple[str, int]], node: str) -> None:
    """Raises a ConfigError if the GPUs of a node are of different models, since a profile has one time for all."""
    models = sorted({name for name, _ in devices})
    rule = f"{node} has GPUs of {len(models)} models ({', '.join(models)}), which take different times"
    action = "set CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES to those of one model"
    require(len(models) < 2, "cluster.torch_device", "cuda", rule, action)


def uses_accelerators(config: ClusterConfig) -> bool:
    """Returns whether a run on this machine uses accelerators; not valid for a Ray cluster."""
    return config.torch_device not in ("auto", "cpu") or (config.torch_device == "auto" and bool(gpus()))


def host_memory_bytes() -> int:
    """Returns this machine's memory, or the limit of this process's control group if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (path.read_text(encoding="utf-8").strip() for path in _MEMORY_LIMITS if path.exists())
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def store_bytes() -> int:
    """Returns the size of the object store that this process starts: as much as the machine can spare.

    An iteration's data and two versions of the weights have to fit, and their sizes are unknown before the first run.
    Pages are allocated when written, so a large store costs nothing, but it must fit into shared memory.
    """
    size = _STORE_SHARE * host_memory_bytes()
    if _SHARED_MEMORY.is_dir():
        size = min(size, _SHARED_SHARE * shutil.disk_usage(_SHARED_MEMORY).free)
    return max(_MIN_STORE_BYTES, int(size))


def processor() -> str:
    """Returns the name of this machine's processor, or "" if the system does not report it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cluster_at_hand(config: ClusterConfig) -> Cluster:
    """Returns the cluster that a run gets.

    Raises:
        ConfigError: it needs more GPUs than are visible, or `cpu_devices` is set although there are no accelerators.
    """
    cluster = local_cluster(config.num_devices, config.torch_device)
    cluster = replace(cluster, device_module=config.device_module, links=Links(**config.links))
    if config.device_memory_bytes is not None:  # Cluster.memory_bytes is per accelerator, but summed over cores
        shares = cluster.num_devices if cluster.kind == "cpu" else 1
        cluster = replace(cluster, memory_bytes=config.device_memory_bytes * shares)
    cluster = with_cores(cluster, config.cpu_devices) if config.cpu_devices else cluster
    return with_waiting(cluster, config.waiting_devices) if config.waiting_devices else cluster


def with_cores(cluster: Cluster, number: int, host_bytes: Sequence[float] | None = None) -> Cluster:
    """Returns a cluster with `number` cores of each node added as devices, numbered after its accelerators.

    `host_bytes` is the host memory of each group's nodes; None: that of this machine.

    Raises:
        ConfigError: the cluster has no accelerators, or a node has fewer cores.
    """
    groups, min_cores = cluster.node_groups(), min(group.cores_per_node for group in cluster.node_groups())
    if cluster.kind == "cpu":
        raise ConfigError(
            f"cluster.cpu_devices is {number}, but it adds cores to nodes with accelerators, and there are none: leave "
            "it out, and use cluster.num_devices"
        )
    if number > min_cores:
        raise ConfigError(
            f"cluster.cpu_devices is {number}, but a node has {min_cores} cores: use "
            f"cluster.cpu_devices={min_cores} or less"
        )
    memory = host_bytes or [float(host_memory_bytes())] * len(groups)
    cores = [
        replace(group, kind="cpu", devices_per_node=number, memory_bytes=memory[k] / number, beside=k)
        for k, group in enumerate(groups)
    ]
    return _regrouped(cluster, [*groups, *cores], f"and {number} cores beside")


def with_waiting(cluster: Cluster, number: int) -> Cluster:
    """Returns a cluster with `number` workers without cores added to its first node, numbered after its devices."""
    first, counts = cluster.node_groups()[0], {"devices_per_node": number, "cores_per_node": number}
    waiting = replace(first, kind=WAITING, num_nodes=1, beside=0, speed=1.0, **counts)
    return _regrouped(cluster, [*cluster.node_groups(), waiting], f"and {number} that wait")


def _regrouped(cluster: Cluster, groups: Sequence[NodeGroup], suffix: str) -> Cluster:
    number = sum(group.num_devices for group in groups)
    return replace(cluster, num_devices=number, groups=tuple(groups), description=f"{cluster.description} {suffix}")


def local_cluster(num_devices: int | None, kind: str = "auto") -> Cluster:
    """Returns this machine as a cluster of `num_devices` devices (None: all) of a kind, see ClusterConfig.

    Raises:
        ConfigError: `num_devices` exceeds the visible GPUs, they are of several models, or `num_devices` is missing for
            a kind other than cpu and cuda.
    """
    visible_gpus, cores = gpus() if kind in ("auto", "cuda") else [], num_cores()
    if kind == "auto":
        kind = "cuda" if visible_gpus else "cpu"
    if kind == "cuda" and (num_devices or 1) > len(visible_gpus):
        setting = "cluster.torch_device is 'cuda'" if num_devices is None else f"cluster.num_devices is {num_devices}"
        action = f"num_devices={len(visible_gpus)} or less" if visible_gpus else "torch_device=cpu"
        raise ConfigError(
            f"{setting}, but this machine has {len(visible_gpus)} visible NVIDIA GPU(s): use cluster.{action}"
        )
    if kind not in ("cpu", "cuda") and num_devices is None:
        raise ConfigError(
            f"cluster.torch_device is {kind!r}, whose number of devices cannot be detected: give cluster.num_devices"
        )
    require_one_model(visible_gpus, "this machine")
    number = num_devices or len(visible_gpus) or cores
    name = visible_gpus[0][0] if visible_gpus else kind
    description = f"{cores} cores" if kind == "cpu" else f"{len(visible_gpus) or number} x {name}"
    memory = min(num_bytes for _, num_bytes in visible_gpus) if visible_gpus else host_memory_bytes()
    return Cluster("local", kind, number, cores, memory, description)
