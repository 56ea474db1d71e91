"""Builds a cluster from what each of its nodes reports.

    facts of every node -> devices of one kind -> groups of identical nodes -> Cluster

The driver's node comes first, so that device 0, whose worker writes most files, shares its file system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup, require_one_model, with_cores
from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node reports about itself."""

    gpus: tuple[tuple[str, int], ...]  # (name, memory in bytes) of each visible GPU
    num_cores: int  # usable by a process
    memory_bytes: int  # of the host, or of the control group
    versions: Mapping[str, str]  # of the packages that must be equal on all nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of a Ray cluster: its id and resources in Ray, and the facts that it reports."""

    node_id: str
    address: str
    num_cpus: int  # available to Ray
    num_gpus: int
    is_here: bool  # whether the driver runs on it
    facts: NodeFacts


def require_alike(nodes: Sequence[RayNode], versions: Mapping[str, str]) -> None:
    """Checks that all nodes have the driver's versions; otherwise weights would depend on the placement.

    Raises:
        ConfigError: names the node and the differing package.
    """
    for node in nodes:
        for name, driver_version in versions.items():
            node_version = node.facts.versions.get(name)
            if node_version != driver_version:
                raise ConfigError(
                    f"cluster.address: node {node.address} has {name} {node_version or 'not at all'}, but the driver "
                    f"has {driver_version}: install the same there, or leave the node out of the cluster"
                )


def cluster_of(nodes: Sequence[RayNode], config: ClusterConfig) -> Cluster:
    """Returns the cluster that a run gets: the GPUs if any node has one, otherwise the cores available to Ray.

    Raises:
        ConfigError: there are fewer devices than requested, none of the kind, or several GPU models in a node.
    """
    kind = _kind(nodes, config.torch_device)
    ordered = sorted(nodes, key=lambda node: (not node.is_here, node.address, node.node_id))
    counted = [(node, _num_devices(node, kind)) for node in ordered]
    available = sum(number for _, number in counted)
    num_devices = available if config.num_devices is None else config.num_devices
    if num_devices > available or not available:
        counts = ", ".join(f"{node.address}: {number}" for node, number in counted)
        raise ConfigError(
            f"cluster.num_devices is {config.num_devices}, but the Ray cluster at {config.address} has {available} "
            f"devices of the kind {kind} ({counts}): use fewer, or start more nodes (docs/clusters.md)"
        )
    used, remaining = [], num_devices
    for node, number in counted:
        used += [(node, _group(node, kind, min(number, remaining)))] if min(number, remaining) else []
        remaining -= min(number, remaining)
    # memory is not compared, since it differs a little between kernels
    by_shape: dict[tuple[str, int, int], list[tuple[RayNode, NodeGroup]]] = {}
    for node, group in used:
        by_shape.setdefault((group.kind, group.devices_per_node, group.cores_per_node), []).append((node, group))
    parts = list(by_shape.values())
    min_bytes = [min(group.memory_bytes for _, group in part) for part in parts]
    groups = [
        replace(part[0][1], num_nodes=len(part), memory_bytes=m) for part, m in zip(parts, min_bytes, strict=True)
    ]
    cluster = Cluster(
        name=config.name,
        kind=kind,
        num_devices=num_devices,
        num_cores=sum(node.facts.num_cores for node, _ in used),
        memory_bytes=int(min(g.memory_bytes * (g.devices_per_node if kind == "cpu" else 1) for g in groups)),
        description=", ".join(f"{g.num_nodes} nodes x {g.devices_per_node} {g.kind}" for g in groups),
        groups=tuple(groups),
        links=Links(**config.links),
        device_module=config.device_module,
        nodes=tuple(node.node_id for part in parts for node, _ in part),
    )
    if not config.cpu_devices:
        return cluster
    for node, _ in used:  # workers reserve their cores with Ray, which may have fewer than the node
        if kind != "cpu" and node.num_cpus < config.cpu_devices:
            raise ConfigError(
                f"cluster.cpu_devices is {config.cpu_devices}, but Ray has {node.num_cpus} cores of node "
                f"{node.address}: use fewer, or start it with `ray start --num-cpus={config.cpu_devices}`"
            )
    hosts = [float(min(node.facts.memory_bytes for node, _ in part)) for part in parts]
    return with_cores(cluster, config.cpu_devices, hosts)


def _kind(nodes: Sequence[RayNode], requested: str) -> str:
    if requested not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"cluster.torch_device is {requested!r}, but on a Ray cluster only cpu and cuda are detected: use "
            "cluster.torch_device=auto"
        )
    if requested == "auto":
        return "cuda" if any(_num_devices(node, "cuda") for node in nodes) else "cpu"
    return requested


def _num_devices(node: RayNode, kind: str) -> int:
    return min(node.num_gpus, len(node.facts.gpus)) if kind == "cuda" else node.num_cpus


def _group(node: RayNode, kind: str, number: int) -> NodeGroup:
    facts = node.facts
    if kind == "cpu":
        memory, name = facts.memory_bytes / max(number, node.num_cpus), kind
    else:
        require_one_model(facts.gpus, f"node {node.address}")
        memory, name = float(min(num_bytes for _, num_bytes in facts.gpus)), facts.gpus[0][0]
    cores = max(facts.num_cores, number)
    return NodeGroup(kind=name, num_nodes=1, devices_per_node=number, memory_bytes=memory, cores_per_node=cores)
