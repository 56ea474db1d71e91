"""Workflows, profiles and clusters for tests of the planner: small, random, and with round numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import FORMAT, Profile, Workload, parse_profile
from rlinf_embodied.workflow.graph import Edge, Loop, StageSpec, WeightEdge, Workflow


def cluster(devices: int = 4, memory_bytes: float = 1e12, node: int | None = None, cores: int = 64) -> Cluster:
    node = node or devices
    group = NodeGroup(
        kind="gpu", num_nodes=devices // node, devices_per_node=node, memory_bytes=memory_bytes, cores_per_node=cores
    )
    links = Links(within_node_bytes_per_s=1e9, across_nodes_bytes_per_s=1e8, latency_s=0.0, submit_s=0.0)
    return Cluster("test", "gpu", devices, cores, int(memory_bytes), groups=(group,), links=links)


def parse(text: str, num_devices: int, workflow: Workflow, name: str = "plan") -> Plan:
    """The plan that a text describes."""
    items, *options = text.split("; ")
    variant: dict[str, object] = {"items": items.split(" > ")}
    for key, _, value in (option.partition(" ") for option in options):
        variant[key] = [*variant.get(key, []), value] if key == "exclusive" else int(value)
    return resolve(name, [variant], num_devices, workflow)


def stage(
    base_s: float, s_per_item: float, resident: float = 0.0, working: float = 0.0, loop: bool = False, **more
) -> dict:
    """A stage that takes base_s + s_per_item * items, whatever the number of devices."""
    items = [1, 2, 64]
    table = [[base_s + s_per_item * n] for n in items]
    key = "s_per_chunk_step" if loop else "s_per_call"
    entry = {"items_per_device": items, "devices": [1], key: table}
    return {**entry, "resident_bytes": resident, "working_bytes": working, **more}


def profile(stages: dict[str, dict], **more) -> Profile:
    return parse_profile({"format": FORMAT, "name": "test", "device_kind": "gpu", "stages": stages, **more})


def graph(
    stages: Sequence[str], edges: Sequence[tuple[str, str]], blocks: int = 8, whole: bool = False, **more
) -> Workflow:
    specs = {name: StageSpec(name, f"fakes.{name}", None) for name in stages}
    return Workflow("test", blocks, specs, tuple(Edge(a, b, whole=whole) for a, b in edges), **more)


def own_graph(work: Workload, stages: Sequence[str]) -> Workflow:
    """What a profile of another workflow could name."""
    return graph(tuple(stages), (), blocks=work.num_items)


def embodied(
    e: tuple[float, float], p: tuple[float, float], a: tuple[float, float], blocks: int = 8, steps: int = 4, **more
) -> tuple[Workflow, Profile]:
    """env <-> policy, actor; each stage as (base seconds, seconds per item)."""
    stages = {"env": stage(*e, loop=True), "policy": stage(*p, loop=True), "actor": stage(*a)}
    for name, extra in more.items():
        stages[name] |= extra
    loop = Loop("rollout", "env", "policy", steps)
    weights = (WeightEdge("actor", "policy"),)
    edges = (("policy", "actor"), ("env", "actor"))
    work = graph(tuple(stages), edges, blocks, whole=True, loops={"rollout": loop}, weight_edges=weights)
    return work, profile(stages)


def replace_cluster(known: Cluster, **changes) -> Cluster:
    return dataclasses.replace(known, **changes)


def with_memory(pricer: Pricer, memory_bytes: float) -> Pricer:
    """The same case on devices with so much memory that every plan fits."""
    groups = tuple(dataclasses.replace(group, memory_bytes=memory_bytes) for group in pricer.cluster.groups)
    return pricer.with_(cluster=dataclasses.replace(pricer.cluster, groups=groups))


def with_speeds(pricer: Pricer, speeds: Sequence[float]) -> Pricer:
    """The same case on devices of these speeds, all in one node."""
    (group,) = pricer.cluster.node_groups()
    groups = [
        dataclasses.replace(group, num_nodes=1, devices_per_node=1, speed=speed, beside=0 if k else None)
        for k, speed in enumerate(speeds)
    ]
    cluster = dataclasses.replace(pricer.cluster, num_devices=len(speeds), groups=tuple(groups))
    return pricer.with_(cluster=cluster)
