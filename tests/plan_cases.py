"""Workflows, profiles and clusters for tests of the planner: small, random, and with round numbers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import any_plan

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


def random_case(seed: int, max_stages: int = 5, max_devices: int = 6, chain: bool = False, blocks: int = 12) -> Pricer:
    """A random acyclic workflow, perhaps with a loop in front, on a random cluster; `chain`: without forks and data."""
    draw = random.Random(seed)
    with_loop = draw.random() < 0.4
    names = [f"s{i}" for i in range(draw.randint(1, max_stages - 2 if with_loop else max_stages))]
    edges = [(names[draw.randrange(i)], names[i]) for i in range(1, len(names))]
    edges += [
        (a, b) for i, a in enumerate(names) for b in names[i + 1 :] if draw.random() < 0.25 and (a, b) not in edges
    ]
    edges = list(itertools.pairwise(names)) if chain else edges
    stages = {name: _random_stage(draw, False) for name in names}
    loops, weights = {}, ()
    if with_loop:
        stages |= {"env": _random_stage(draw, True), "policy": _random_stage(draw, True)}
        stages["policy"]["bootstrap_fraction"] = draw.choice([0.0, 0.25, 1.0])
        edges.append(("policy", names[0]))
        loops = {"rollout": Loop("rollout", "env", "policy", draw.randint(1, 6))}
        weights = (WeightEdge(names[-1], "policy"),)
    specs = {name: StageSpec(name, f"fakes.{name}", None) for name in stages}
    joined = tuple(Edge(a, b, whole=not (draw.random() < 0.7 and a != "policy")) for a, b in edges)
    work = Workflow("random", draw.choice([6, blocks]), specs, joined, weights, loops)
    bytes_per_item = {f"{a}->{b}": 0.0 if chain else draw.choice([0.0, 0.0, 2e8, 1e9]) for a, b in edges}
    if with_loop:
        bytes_per_item |= {"env->policy": draw.choice([0.0, 3e8]), "policy->env": draw.choice([0.0, 1e7])}
    measured = profile(
        stages,
        edge_bytes_per_item=bytes_per_item,
        weights={f"{w.source}->{w.target}": {"bytes": 1e9, "install_s": 0.5} for w in weights},
    )
    return Pricer(work, measured, cluster(draw.randint(1, max_devices), draw.choice([25.0, 45.0, 1000.0])))


def _random_stage(draw: random.Random, loop: bool) -> dict:
    flat = draw.random() < 0.3
    return stage(
        draw.choice([0.0, 0.5, 2.0]) + (5.0 if flat else 0.0),
        0.0 if flat else draw.choice([0.25, 1.0, 3.0]),
        resident=float(draw.choice([1, 5, 10, 15])),
        working=float(draw.choice([0, 2, 6])),
        loop=loop,
        offloaded_bytes=float(draw.choice([0, 1])),
        offload_s=draw.choice([0.0, 0.5]),
        onload_s=draw.choice([0.0, 1.0]),
    )


def replace_cluster(known: Cluster, **changes) -> Cluster:
    return dataclasses.replace(known, **changes)


def with_memory(pricer: Pricer, memory_bytes: float) -> Pricer:
    """The same case on devices with so much memory that every plan fits."""
    groups = tuple(dataclasses.replace(group, memory_bytes=memory_bytes) for group in pricer.cluster.groups)
    return pricer.with_(cluster=dataclasses.replace(pricer.cluster, groups=groups))


def random_plan(pricer: Pricer, draw: random.Random, staleness: int = 0) -> Plan:
    """Any plan that the executor runs."""
    while True:
        plan = any_plan.random_plan(pricer.workflow, pricer.cluster.num_devices, draw, staleness)
        if plan is not None:
            return plan


def with_speeds(pricer: Pricer, speeds: Sequence[float]) -> Pricer:
    """The same case on devices of these speeds, all in one node."""
    (group,) = pricer.cluster.node_groups()
    groups = [
        dataclasses.replace(group, num_nodes=1, devices_per_node=1, speed=speed, beside=0 if k else None)
        for k, speed in enumerate(speeds)
    ]
    cluster = dataclasses.replace(pricer.cluster, num_devices=len(speeds), groups=tuple(groups))
    return pricer.with_(cluster=cluster)
