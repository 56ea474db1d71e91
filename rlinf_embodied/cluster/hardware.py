"""The available devices as plain values: accelerators, or cores on machines without any; one machine or many."""

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

EMULATED = "emulated"  # the name of a device that is only described
WAITING = "waiting"  # the kind of devices that are workers without a core, for stages that wait for something else
RAY_GPUS = ("cuda",)  # kinds that Ray counts as GPUs: a worker sees its own device only, as number 0
_MEMORY_LIMITS = tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
_SHARED_MEMORY = Path("/dev/shm")
_STORE_SHARE, _SHARED_SHARE = 0.3, 0.9  # of the host's memory, and of what is free of its shared memory
_LEAST_STORE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are alike."""

    kind: str  # of their devices: "cpu", "h100", ...
    num_nodes: int
    devices_per_node: int
    memory_bytes: float  # of each device
    cores_per_node: int
    beside: int | None = None  # the earlier group that shares its nodes with these devices; None: separate nodes
    speed: float = 1.0  # of each device, as a share of that of others of its kind

    @property
    def on_host(self) -> bool:
        """Whether they are workers on the host's cores, or on none, and no accelerators."""
        return self.kind in ("cpu", WAITING)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def cores_per_device(self) -> float:
        return self.cores_per_node / self.devices_per_node


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device lies: Place(group, node=2, index=1) is the second device of the third node."""

    group: NodeGroup
    node: int  # of all groups together
    index: int  # within the node


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What a device sends at: to another device of its node, and to one of another node."""

    within_node_bytes_per_s: float = 4.0e9
    across_nodes_bytes_per_s: float = 1.0e9
    latency_s: float = 0.001
    submit_s: float = 0.0005  # of the driver, for each call that it submits


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices numbered from 0, group after group and node after node; without accelerators a device is one core."""

    name: str
    kind: str  # torch's name of its devices: "cuda", "cpu", ...
    num_devices: int
    num_cores: int
    memory_bytes: int
    description: str = ""
    groups: tuple[NodeGroup, ...] = ()  # (): one node with all of the above
    links: Links = Links()
    emulated: bool = False  # only described: stages sleep instead of computing
    device_module: str | None = None  # that makes the kind known to torch, see device.py
    nodes: tuple[str, ...] = ()  # Ray's id of each node, in the order of the groups; (): all is on this machine

    def node_groups(self) -> tuple[NodeGroup, ...]:
        """Returns the groups of alike nodes, in the order in which their devices are numbered."""
        if self.groups:
            return self.groups
        number, memory = self.num_devices, self.memory_bytes / (self.num_devices if self.kind == "cpu" else 1)
        alike = {"num_nodes": 1, "devices_per_node": number, "cores_per_node": max(self.num_cores, number)}
        return (NodeGroup(kind=self.kind, memory_bytes=memory, **alike),)

    @property
    def num_computing(self) -> int:
        """Number of devices that any stage may be on: without cores next to accelerators, and workers that wait."""
        return sum(group.num_devices for group in self.node_groups() if not self._is_other(group))

    def _is_other(self, group: NodeGroup) -> bool:
        """Returns whether devices share nodes with devices of another kind."""
        return group.beside is not None and group.kind != self.node_groups()[group.beside].kind

    @property
    def cores_beside(self) -> tuple[int, ...]:
        """The devices that are cores beside accelerators: of stages that run on nothing else."""
        groups = zip(self.node_groups(), self.group_devices(), strict=True)
        return tuple(k for group, devices in groups if self._is_other(group) and group.kind == "cpu" for k in devices)

    def group_devices(self) -> tuple[range, ...]:
        groups = self.node_groups()
        ends = accumulate(group.num_devices for group in groups)
        return tuple(range(end - group.num_devices, end) for group, end in zip(groups, ends, strict=True))

    def place_of(self, device: int) -> Place:
        first_nodes: list[int] = []  # of each group so far
        alike: Counter[tuple[int | None, str]] = Counter()  # devices of a kind so far, in a node of a group
        next_node = 0
        for group, devices in zip(self.node_groups(), self.group_devices(), strict=True):
            first_nodes.append(next_node if group.beside is None else first_nodes[group.beside])
            if device in devices:
                node, index = divmod(device - devices.start, group.devices_per_node)
                return Place(group, first_nodes[-1] + node, index + alike[group.beside, group.kind])
            next_node += group.num_nodes if group.beside is None else 0
            here = len(first_nodes) - 1 if group.beside is None else group.beside
            alike[here, group.kind] += group.devices_per_node
        raise AssertionError(f"device {device} lies beyond the {self.num_devices} devices of cluster {self.name}")

    def node_id(self, device: int) -> str | None:
        """Returns Ray's id of the node of a device; None on a cluster of this machine alone."""
        return self.nodes[self.place_of(device).node] if self.nodes else None

    def torch_device(self, device: int) -> str:
        """Returns torch's name of a device as the worker that owns it sees it."""
        if self.emulated:
            return EMULATED
        place = self.place_of(device)
        if self.kind == "cpu" or place.group.on_host:
            return "cpu"
        return f"{self.kind}:{0 if self.kind in RAY_GPUS else place.index}"


def gpus() -> list[tuple[str, int]]:
    """Returns name and bytes of each visible NVIDIA GPU, from nvidia-smi (importing torch takes seconds).

    A GPU has the memory of its host where the driver reports none, since they share it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or visible == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    found = []
    for line in answer.stdout.splitlines() if answer.returncode == 0 else ():
        name, _, reported = (part.strip() for part in line.rpartition(","))  # in MiB, or "[N/A]"
        found.append((name, int(reported) << 20 if reported.isdigit() else host_memory_bytes()))
    if visible is None:
        return found
    asked = [text.strip() for text in visible.split(",")]
    return (
        [found[int(n)] for n in asked if int(n) < len(found)] if all(map(str.isdigit, asked)) else found[: len(asked)]
    )


def require_one_model(found: Sequence[tuple[str, int]], node: str) -> None:
    """Raises a ConfigError if the GPUs of a node are unlike: a profile has one time for all of them."""
    models = sorted({name for name, _ in found})
    rule = f"{node} has GPUs of {len(models)} models ({', '.join(models)}), which take different times"
    action = "set CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES to those of one model"
    require(len(models) < 2, "cluster.torch_device", "cuda", rule, action)


def uses_accelerators(config: ClusterConfig) -> bool:
    """Returns whether a run on this machine computes on accelerators; of a Ray cluster only its nodes know."""
    return config.torch_device not in ("auto", "cpu") or (config.torch_device == "auto" and bool(gpus()))


def host_memory_bytes() -> int:
    """Returns this machine's memory, or what the control group of this process may have of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (path.read_text(encoding="utf-8").strip() for path in _MEMORY_LIMITS if path.exists())
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])


def store_bytes() -> int:
    """Returns the size of the object store that this process starts: as much as the machine can spare.

    An iteration's data and two versions of the weights have to fit, which nobody knows before the first run.  Pages of
    the store are taken when they are written, so a large one costs nothing; but it must fit into shared memory.
    """
    share = _STORE_SHARE * host_memory_bytes()
    if _SHARED_MEMORY.is_dir():
        share = min(share, _SHARED_SHARE * shutil.disk_usage(_SHARED_MEMORY).free)
    return max(_LEAST_STORE_BYTES, int(share))


def processor() -> str:
    """Returns the name of this machine's processor, "" where the system does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cluster_at_hand(config: ClusterConfig) -> Cluster:
    """Returns the cluster that a run gets.

    Raises:
        ConfigError: an emulated cluster was asked for, more GPUs than there are, or cores beside accelerators where
            there are none of these.
    """
    if config.emulated:
        name = config.name.removeprefix("emulated_")
        raise ConfigError(
            f"cluster is {config.name!r}, only described: plan for it with experiments/plan.py cluster={name}, run "
            f"its plans with experiments/emulate.py cluster={name}, and train with cluster=local"
        )
    cluster = local_cluster(config.num_devices, config.torch_device)
    cluster = replace(cluster, device_module=config.device_module, links=Links(**config.links))
    if config.device_memory_bytes is not None:  # a cluster has that of all of its cores
        shares = cluster.num_devices if cluster.kind == "cpu" else 1
        cluster = replace(cluster, memory_bytes=config.device_memory_bytes * shares)
    cluster = with_cores(cluster, config.cpu_devices) if config.cpu_devices else cluster
    return with_waiting(cluster, config.waiting_devices) if config.waiting_devices else cluster


def with_cores(cluster: Cluster, number: int, host_bytes: Sequence[float] | None = None) -> Cluster:
    """Returns a cluster with cores of each node as separate devices, behind its accelerators.

    `host_bytes` are the memory of the hosts of each group of nodes; None: that of this machine.

    Raises:
        ConfigError: it has no accelerators, or a node has fewer cores.
    """
    first, least = cluster.node_groups(), min(group.cores_per_node for group in cluster.node_groups())
    if cluster.kind == "cpu":
        raise ConfigError(
            f"cluster.cpu_devices is {number}, but there is no accelerator for cores to be beside: leave it out, and "
            "use cluster.num_devices"
        )
    if number > least:
        raise ConfigError(
            f"cluster.cpu_devices is {number}, but a node has {least} cores: use cluster.cpu_devices={least} or less"
        )
    memory = host_bytes or [float(host_memory_bytes())] * len(first)
    cores = [
        replace(group, kind="cpu", devices_per_node=number, memory_bytes=memory[k] / number, beside=k)
        for k, group in enumerate(first)
    ]
    return _regrouped(cluster, [*first, *cores], f"and {number} cores beside")


def with_waiting(cluster: Cluster, number: int) -> Cluster:
    """Returns a cluster with workers that have no core, behind its devices and in its first node."""
    first, alike = cluster.node_groups()[0], {"devices_per_node": number, "cores_per_node": number}
    waiting = replace(first, kind=WAITING, num_nodes=1, beside=0, speed=1.0, **alike)
    return _regrouped(cluster, [*cluster.node_groups(), waiting], f"and {number} that wait")


def _regrouped(cluster: Cluster, groups: Sequence[NodeGroup], what: str) -> Cluster:
    number = sum(group.num_devices for group in groups)
    return replace(cluster, num_devices=number, groups=tuple(groups), description=f"{cluster.description} {what}")


def local_cluster(num_devices: int | None, kind: str = "auto") -> Cluster:
    """Returns this machine as a cluster of `num_devices` devices (None: all of them) of a kind, see ClusterConfig.

    Raises:
        ConfigError: more GPUs are asked for than there are, these are of several models, or the number of devices of
            another kind is missing.
    """
    found, cores = gpus() if kind in ("auto", "cuda") else [], num_cores()
    if kind == "auto":
        kind = "cuda" if found else "cpu"
    if kind == "cuda" and (num_devices or 1) > len(found):
        wanted = "cluster.torch_device is 'cuda'" if num_devices is None else f"cluster.num_devices is {num_devices}"
        instead = f"num_devices={len(found)} or less" if found else "torch_device=cpu"
        raise ConfigError(f"{wanted}, but this machine has {len(found)} visible NVIDIA GPU(s): use cluster.{instead}")
    if kind not in ("cpu", "cuda") and num_devices is None:
        raise ConfigError(
            f"cluster.torch_device is {kind!r}, of which only torch knows how many there are: give cluster.num_devices"
        )
    require_one_model(found, "this machine")
    number = num_devices or len(found) or cores
    name = found[0][0] if found else kind
    description = f"{cores} cores" if kind == "cpu" else f"{len(found) or number} x {name}"
    memory = min(num_bytes for _, num_bytes in found) if found else host_memory_bytes()
    return Cluster("local", kind, number, cores, memory, description)
