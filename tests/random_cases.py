"""Random workflows, profiles and clusters that are small enough to enumerate every plan."""

from __future__ import annotations

import random

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import FORMAT, parse_profile
from rlinf_embodied.workflow.graph import Edge, Loop, StageSpec, WeightEdge, Workflow

GB = 1e9


def random_case(seed: int, most_stages: int, most_devices: int) -> Pricer:
    """Returns a workflow of 2 to `most_stages` stages (a loop counts as two) on 1 to `most_devices` devices.

    Two in five have a loop, half have so little memory that not everything fits together, a third have two kinds of
    devices, a fifth two nodes; some stages have a flat part, some long tails, some edges carry data or do not stream.
    """
    draw = random.Random(seed)
    num_stages = draw.randint(2, most_stages)
    with_loop = num_stages > 2 and draw.random() < 0.4
    names = [f"s{i}" for i in range(num_stages - 2 if with_loop else num_stages)]
    edges = [(names[draw.randrange(i)], names[i]) for i in range(1, len(names))]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    edges += [pair for pair in pairs if pair not in edges and draw.random() < 0.25]
    cluster, kinds = _cluster(draw, most_devices)
    stages = {name: _stage(draw, kinds) for name in names}
    loops, weights, wires = {}, (), {edge: draw.choice([0.0, 0.0, 0.2, 1.0]) * GB for edge in edges}
    if with_loop:
        stages |= {"env": _stage(draw, kinds, loop=True), "policy": _stage(draw, kinds, loop=True)}
        stages["policy"]["bootstrap_fraction"] = draw.choice([0.0, 0.25, 1.0])
        edges.append(("policy", names[0]))
        wires |= {("env", "policy"): draw.choice([0.0, 0.3]) * GB, ("policy", "env"): draw.choice([0.0, 0.01]) * GB}
        loops = {"rollout": Loop("rollout", "env", "policy", draw.randint(2, 8))}
        weights = (WeightEdge(names[-1], "policy"),)
    elif draw.random() < 0.3:
        stages[names[0]]["finish_quantiles"] = [[0.0, 0.0], [0.5, 0.2], [1.0, 1.0]]
    specs = {name: StageSpec(name, f"random.{name}", None) for name in stages}
    joined = [Edge(a, b, whole=not (a != "policy" and draw.random() < 0.7)) for a, b in edges]
    work = Workflow(f"random {seed}", draw.choice([4, 6, 8, 12]), specs, tuple(joined), weights, loops)
    data = {
        "format": FORMAT,
        "name": work.name,
        "device_kind": "gpu",
        "stages": stages,
        "edge_bytes_per_item": {f"{a}->{b}": size for (a, b), size in wires.items()},
        "weights": {f"{edge.source}->{edge.target}": {"bytes": GB, "install_s": 0.5} for edge in weights},
    }
    return Pricer(work, parse_profile(data), cluster)


def _cluster(draw: random.Random, most_devices: int) -> tuple[Cluster, tuple[str, ...]]:
    devices = draw.randint(1, most_devices)
    memory = draw.choice([1000.0, 1000.0, 45.0, 25.0]) * GB
    sizes = [devices]
    if devices > 1 and draw.random() < 0.33:
        first = draw.randint(1, devices - 1)
        sizes = [first, devices - first]
    two_nodes = len(sizes) == 1 and devices % 2 == 0 and draw.random() < 0.3
    kinds = ("gpu", "other")[: len(sizes)]
    groups = tuple(
        NodeGroup(
            kind=kind,
            num_nodes=2 if two_nodes else 1,
            devices_per_node=size // 2 if two_nodes else size,
            memory_bytes=memory if kind == "gpu" else memory * draw.choice([0.5, 1.0]),
            cores_per_node=64,
        )
        for kind, size in zip(kinds, sizes, strict=True)
    )
    links = Links(
        within_node_bytes_per_s=GB, across_nodes_bytes_per_s=GB / 4, latency_s=draw.choice([0.0, 0.01]), submit_s=0.0
    )
    return Cluster("random", "+".join(kinds), devices, 64, int(memory), groups=groups, links=links), kinds


def _stage(draw: random.Random, kinds: tuple[str, ...], loop: bool = False) -> dict[str, object]:
    """Returns a profile's entry: seconds with a fixed part and one per item."""
    flat = draw.random() < 0.3
    base_s = draw.choice([0.0, 0.5, 2.0]) + (5.0 if flat else 0.0)
    item_s = 0.0 if flat else draw.choice([0.25, 1.0, 3.0])
    items = [1, 2, 64]
    entry: dict[str, object] = {
        "items_per_device": items,
        "devices": [1],
        "s_per_chunk_step" if loop else "s_per_call": [[base_s + item_s * n] for n in items],
        "resident_bytes": draw.choice([1, 5, 10, 15]) * GB,
        "working_bytes": draw.choice([0, 2, 6]) * GB,
        "offloaded_bytes": draw.choice([0, 1]) * GB,
        "offload_s": draw.choice([0.0, 0.5]),
        "onload_s": draw.choice([0.0, 1.0]),
    }
    if len(kinds) > 1 and draw.random() < 0.8:
        entry["kind_factors"] = {"gpu": 1.0, "other": draw.choice([0.5, 1.0, 2.0, 4.0])}
    return entry
