"""A cluster of several nodes from what each of them reports; plain functions of plain values.

    facts of every node -> devices of one kind -> groups of alike nodes -> Cluster

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
    """What a node reports of itself."""

    gpus: tuple[tuple[str, int], ...]  # name and bytes of the GPUs that are visible there
    num_cores: int  # that a process may use
    memory_bytes: int  # of the host, or of the control group
    versions: Mapping[str, str]  # of what must be alike on all nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of a Ray cluster: how Ray knows it, what it was given to Ray with, and its own words."""

    node_id: str
    address: str
    num_cpus: int  # that Ray may use
    num_gpus: int
    is_here: bool  # whether it is the driver's
    facts: NodeFacts


def require_alike(nodes: Sequence[RayNode], versions: Mapping[str, str]) -> None:
    """Checks that all nodes run what the driver runs: weights would depend on the place otherwise.

    Raises:
        ConfigError: names the node, and what differs.
    """
    for node in nodes:
        for name, here in versions.items():
            there = node.facts.versions.get(name)
            if there != here:
                raise ConfigError(
                    f"cluster.address: node {node.address} has {name} {there or 'not at all'}, but the driver has "
                    f"{here}: install the same there, or leave the node out of the cluster"
                )


def cluster_of(nodes: Sequence[RayNode], config: ClusterConfig) -> Cluster:
    """Returns the cluster that a run gets: GPUs where any node has one, otherwise the cores that Ray was given.

    Raises:
        ConfigError: there are fewer devices than are asked for, none of the kind, or several models in a node.
    """
    kind = _kind(nodes, config.torch_device)
    ordered = sorted(nodes, key=lambda node: (not node.is_here, node.address, node.node_id))
    counted = [(node, _num_devices(node, kind)) for node in ordered]
    found = sum(number for _, number in counted)
    wanted = found if config.num_devices is None else config.num_devices
    if wanted > found or not found:
        there = ", ".join(f"{node.address}: {number}" for node, number in counted)
        raise ConfigError(
            f"cluster.num_devices is {config.num_devices}, but the Ray cluster at {config.address} has {found} devices "
            f"of the kind {kind} ({there}): use fewer, or start more nodes (docs/clusters.md)"
        )
    used, left = [], wanted
    for node, number in counted:
        used += [(node, _group(node, kind, min(number, left)))] if min(number, left) else []
        left -= min(number, left)
    alike: dict[tuple[str, int, int], list[tuple[RayNode, NodeGroup]]] = {}  # memory differs a little between kernels
    for node, group in used:
        alike.setdefault((group.kind, group.devices_per_node, group.cores_per_node), []).append((node, group))
    parts = list(alike.values())
    least = [min(group.memory_bytes for _, group in part) for part in parts]
    groups = [replace(part[0][1], num_nodes=len(part), memory_bytes=m) for part, m in zip(parts, least, strict=True)]
    cluster = Cluster(
        name=config.name,
        kind=kind,
        num_devices=wanted,
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
    for node, _ in used:  # their workers' cores are held with Ray, which may have been given fewer than there are
        if kind != "cpu" and node.num_cpus < config.cpu_devices:
            raise ConfigError(
                f"cluster.cpu_devices is {config.cpu_devices}, but Ray has {node.num_cpus} cores of node "
                f"{node.address}: use fewer, or start it with `ray start --num-cpus={config.cpu_devices}`"
            )
    hosts = [float(min(node.facts.memory_bytes for node, _ in part)) for part in parts]
    return with_cores(cluster, config.cpu_devices, hosts)


def _kind(nodes: Sequence[RayNode], asked: str) -> str:
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"cluster.torch_device is {asked!r}, but on a Ray cluster only cpu and cuda are found: use "
            "cluster.torch_device=auto"
        )
    if asked == "auto":
        return "cuda" if any(_num_devices(node, "cuda") for node in nodes) else "cpu"
    return asked


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
