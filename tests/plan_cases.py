"""Workflows, profiles and clusters for tests of the planner: small, random, and with round numbers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning import cost
from rlinf_embodied.planning.cost import Price
from rlinf_embodied.planning.plan import Devices, Leaf, LoopNode, Node, Spatial, Temporal
from rlinf_embodied.planning.plan_check import require_runnable
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import FORMAT, Profile, Workload, parse_profile
from rlinf_embodied.workflow.graph import WHOLE, Edge, Loop, StageSpec, WeightEdge, Workflow


def cluster(devices: int = 4, memory_bytes: float = 1e12, node: int | None = None, cores: int = 64) -> Cluster:
    node = node or devices
    group = NodeGroup(
        kind="gpu", num_nodes=devices // node, devices_per_node=node, memory_bytes=memory_bytes, cores_per_node=cores
    )
    links = Links(within_node_bytes_per_s=1e9, across_nodes_bytes_per_s=1e8, latency_s=0.0)
    return Cluster("test", "gpu", devices, cores, int(memory_bytes), groups=(group,), links=links)


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
    granularities = (WHOLE,) if whole else ()
    specs = {name: StageSpec(name, f"fakes.{name}", None) for name in stages}
    return Workflow("test", blocks, specs, tuple(Edge(a, b, 0.0, granularities) for a, b in edges), **more)


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
    joined = tuple(
        Edge(a, b, granularities=() if draw.random() < 0.7 and a != "policy" else (WHOLE,)) for a, b in edges
    )
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


# ----------------------------------------------------------------------------------------------- exhaustive enumeration
def all_trees(pricer: Pricer) -> tuple[float, int]:
    """Returns the least seconds per iteration over every tree that fits into memory, and how many trees there are.

    Nothing is pruned: each set of stages on each number of devices has the prices of all of its trees.
    """
    every = sum(pricer.bits.values())
    capacity = pricer.classes[0].memory_bytes
    with np.errstate(invalid="ignore"):
        prices = _enumerate(pricer, every, pricer.classes[0].num_devices, 1, {})
        seconds = cost.iteration_s(prices, 1)
    fits = np.isfinite(seconds) & (prices.peak_bytes <= capacity)
    return (float(seconds[fits].min()) if fits.any() else np.inf), len(seconds)


def _enumerate(pricer: Pricer, mask: int, n: int, chunks: int, memo: dict) -> Price:
    key = (mask, n, chunks)
    if key not in memo:
        found = list(_trees(pricer, mask, n, chunks, memo))
        memo[key] = _concatenate(found) if found else None
    return memo[key]


def _trees(pricer: Pricer, mask: int, n: int, chunks: int, memo: dict) -> Iterator[Price]:
    names = [name for name, bit in pricer.bits.items() if bit & mask]
    here = np.array([[n]])
    for loop in pricer.workflow.loops.values():
        if set(names) == set(loop.sides) and chunks == 1:
            yield pricer.loop_collocated((loop,), here)
            for k in range(1, n):
                for shards in loop.shards:
                    yield pricer.loop_disaggregated((loop,), np.array([[k]]), np.array([[n - k]]), shards)
    inside = {side for loop in pricer.workflow.loops.values() for side in loop.sides}
    if len(names) == 1 and names[0] not in inside:
        yield pricer.leaf(names[0], here, chunks)
    for first in range(1, mask):
        second = mask & ~first
        if first & ~mask or not second or not _may_go_first(pricer, first, second):
            continue
        yield from _joined(pricer, first, second, n, chunks, memo)


def _may_go_first(pricer: Pricer, first: int, second: int) -> bool:
    for loop in pricer.workflow.loops.values():
        ends = pricer.mask_of((loop,))
        if first & ends and second & ends:
            return False
    return not pricer.cut(second, first).edges


def _joined(pricer: Pricer, first: int, second: int, n: int, chunks: int, memo: dict) -> Iterator[Price]:
    cut = pricer.cut(first, second)
    a, b = (_enumerate(pricer, mask, n, chunks, memo) for mask in (first, second))
    if a is not None and b is not None:
        by_chunk = pricer.by_chunk(first, second, chunks)
        for resident in (True, False):
            yield _done(pricer.temporal(cut, _tall(a), b, chunks, np.array([[n]]), by_chunk, resident), chunks)
    for k in range(1, n):
        for inner in pricer.chunk_counts() if chunks == 1 else (chunks,):
            if not pricer.streams(first, second, inner):
                continue
            a, b = _enumerate(pricer, first, k, inner, memo), _enumerate(pricer, second, n - k, inner, memo)
            if a is not None and b is not None:
                joined = pricer.spatial(cut, _tall(a), b, inner, np.array([[k]]), np.array([[n - k]]))
                yield cost.collapse(_flat(joined), inner) if chunks == 1 else _flat(joined)


def _done(price: Price, chunks: int) -> Price:
    return cost.collapse(_flat(price), 1) if chunks == 1 else _flat(price)


def _fields(price: Price) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(price, name)) for name in Price.__dataclass_fields__}


def _tall(price: Price) -> Price:
    return Price(**{name: value[:, None] for name, value in _fields(price).items()})


def _flat(price: Price) -> Price:
    arrays = _fields(price)
    shape = np.broadcast_shapes(*(value.shape for value in arrays.values()))
    return Price(**{name: np.broadcast_to(value, shape).ravel() for name, value in arrays.items()})


def _concatenate(prices: Sequence[Price]) -> Price:
    return Price(
        **{name: np.concatenate([_fields(_flat(p))[name] for p in prices]) for name in Price.__dataclass_fields__}
    )


def replace_cluster(known: Cluster, **changes) -> Cluster:
    return dataclasses.replace(known, **changes)


def with_memory(pricer: Pricer, memory_bytes: float) -> Pricer:
    """The same case on devices with so much memory that every tree fits."""
    groups = tuple(dataclasses.replace(group, memory_bytes=memory_bytes) for group in pricer.cluster.groups)
    return Pricer(pricer.workflow, pricer.profile, dataclasses.replace(pricer.cluster, groups=groups))


def wide_tree(pricer: Pricer, draw: random.Random) -> Node:
    """Any tree that the executor runs: each stage on any of its devices, parts of turns on different ones."""
    order = _units(pricer)
    while True:
        tree = _wide_node(pricer, draw, order, tuple(range(pricer.cluster.num_devices)), WHOLE)
        try:
            require_runnable("random", tree, pricer.workflow)
        except PlanError:
            continue
        return tree


def with_speeds(pricer: Pricer, speeds: Sequence[float]) -> Pricer:
    """The same case on devices of these speeds, all in one node."""
    (group,) = pricer.cluster.node_groups()
    groups = [
        dataclasses.replace(group, num_nodes=1, devices_per_node=1, speed=speed, beside=0 if k else None)
        for k, speed in enumerate(speeds)
    ]
    cluster = dataclasses.replace(pricer.cluster, num_devices=len(speeds), groups=tuple(groups))
    return Pricer(pricer.workflow, pricer.profile, cluster)


def with_shares(node: Node, pricer: Pricer, draw: random.Random) -> Node:
    """The same tree with random shares of the blocks, where they can be run; as it is where none can."""
    for _ in range(20):
        tree = _shared(node, pricer.workflow.num_blocks, draw)
        try:
            require_runnable("random", tree, pricer.workflow)
        except PlanError:
            continue
        return tree
    return node


def _shared(node: Node, num_blocks: int, draw: random.Random) -> Node:
    if isinstance(node, Leaf):
        ends = sorted(draw.sample(range(1, num_blocks), len(node.devices) - 1))
        shares = tuple(b - a for a, b in itertools.pairwise([0, *ends, num_blocks]))
        return dataclasses.replace(node, shares=shares if draw.random() < 0.7 else ())
    if isinstance(node, LoopNode):
        sides = [_shared(leaf, num_blocks, draw) for leaf in node.stages]
        return dataclasses.replace(node, stages=tuple(side for side in sides if isinstance(side, Leaf)))
    return dataclasses.replace(node, parts=tuple(_shared(part, num_blocks, draw) for part in node.parts))


def _units(pricer: Pricer) -> list[str]:
    """Stages and loops (by the opener's name) in the order of the edges."""
    behind = {side for loop in pricer.workflow.loops.values() for side in loop.sides[1:]}
    return [stage for stage in pricer.workflow.order() if stage not in behind]


def _wide_node(pricer: Pricer, draw: random.Random, units: list[str], devices: Devices, chunk: int) -> Node:
    if len(units) == 1:
        loop = next((loop for loop in pricer.workflow.loops.values() if loop.opener == units[0]), None)
        if loop is None:
            return Leaf(units[0], _some(draw, devices))
        sides = tuple(Leaf(stage, _some(draw, devices)) for stage in loop.sides)
        return LoopNode(loop.name, sides, draw.choice(loop.shards))
    at = draw.randint(1, len(units) - 1)
    halves = units[:at], units[at:]
    if len(devices) > 1 and draw.random() < 0.5:
        sizes = [WHOLE, *(g for g in range(1, pricer.workflow.num_blocks) if pricer.workflow.num_blocks % g == 0)]
        size, cut = draw.choice(sizes), draw.randint(1, len(devices) - 1)
        mixed = draw.sample(devices, len(devices))
        own = sorted(mixed[:cut]), sorted(mixed[cut:])
        parts = (_wide_node(pricer, draw, half, tuple(o), chunk or size) for half, o in zip(halves, own, strict=True))
        return Spatial(tuple(parts), size)
    parts = (_wide_node(pricer, draw, half, devices, chunk) for half in halves)
    return Temporal(tuple(parts), draw.random() < 0.7)


def _some(draw: random.Random, devices: Devices) -> Devices:
    return tuple(sorted(draw.sample(devices, draw.randint(1, len(devices)))))
