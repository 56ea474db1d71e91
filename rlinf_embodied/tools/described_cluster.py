"""Clusters that are only described, for planning and emulation: files below configs/cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup
from rlinf_embodied.errors import ConfigError

_LARGEST = 1e30  # beyond any bytes and rates; products of such numbers stay finite
_COUNTS = ("num_nodes", "devices_per_node", "cores_per_node")
_Schema = TypeVar("_Schema", NodeGroup, Links)


def described_cluster(data: Mapping[str, object], path: str) -> Cluster:
    """Returns the cluster that a configs/cluster file describes: `name`, `nodes` (a list of groups) and `links`.

    Raises:
        ConfigError: a key is missing or unknown, or a number is not positive.
    """
    nodes = data.get("nodes")
    if not isinstance(nodes, (list, tuple)) or not nodes:
        raise ConfigError(f"{path}.nodes is {nodes!r}, but a cluster has at least one group of nodes: describe it")
    groups = tuple(_record(NodeGroup, group, f"{path}.nodes[{i}]") for i, group in enumerate(nodes))
    for i, group in enumerate(groups):
        if group.beside is not None and not (
            group.beside in range(i)
            and groups[group.beside].beside is None
            and groups[group.beside].num_nodes == group.num_nodes
        ):
            raise ConfigError(
                f"{path}.nodes[{i}].beside is {group.beside!r}, but it is the number of an earlier group with nodes of "
                f"its own, and as many as these: correct the file"
            )
    links = _record(Links, data.get("links", {}), f"{path}.links")
    kinds = "+".join(group.kind for group in groups)
    return Cluster(
        name=str(data.get("name", path)),
        kind=kinds,
        num_devices=sum(group.num_devices for group in groups),
        num_cores=sum(group.num_nodes * group.cores_per_node for group in groups),
        memory_bytes=int(min(group.memory_bytes for group in groups)),
        description=", ".join(f"{g.num_nodes} nodes x {g.devices_per_node} {g.kind}" for g in groups),
        groups=groups,
        links=links,
        emulated=True,
    )


def _record(schema: type[_Schema], data: object, path: str) -> _Schema:
    """Returns a dataclass of positive numbers (and texts) from plain data."""
    names = [entry.name for entry in fields(schema)]
    body = dict(data) if isinstance(data, Mapping) else {}
    unknown = sorted(str(name) for name in body if name not in names)
    missing = [name for name in names if name not in (*body, "beside", "speed")] if schema is NodeGroup else []
    if unknown or missing or not isinstance(data, Mapping):
        raise ConfigError(f"{path} has unknown keys {unknown} and lacks {missing}: its keys are {', '.join(names)}")
    for name, value in body.items():
        if (name == "kind" and isinstance(value, str)) or name == "beside":
            continue
        if (
            name == "kind"
            or isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= _LARGEST
        ):
            what = "the name of a kind of device" if name == "kind" else "a positive number"
            raise ConfigError(f"{path}.{name} is {value!r}, but it is {what}: correct the file")
        if name in _COUNTS and value != int(value):
            raise ConfigError(f"{path}.{name} is {value!r}, but it is a whole number: correct the file")
    return schema(**body)
