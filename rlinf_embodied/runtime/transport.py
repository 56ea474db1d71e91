"""Which way each edge's data goes, chosen at launch from the placement: plain functions of plan, cluster and session.

`handover` decides what stays in its worker, which the executor obeys; `routes` reports it edge by edge:

    same worker      in_process      a reference; nothing is copied
    same node        shared_memory   packed as numpy into the node's object store, mapped by the reader
    other node       network         the same; the object stores copy it from node to node

Data that is consumed elsewhere too, and messages of a loop that is a call per step, leave their worker for all.
`cluster.transport=object_store` sends everything through the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.workflow.graph import Workflow


class Transport(StrEnum):
    """How a payload gets from worker to worker."""

    in_process = "in_process"
    shared_memory = "shared_memory"
    network = "network"


@dataclass(frozen=True, slots=True)
class Route:
    """Which ways the data of an edge goes."""

    edge: str  # "policy -> actor"
    kind: str  # data, loop or weights
    blocks: Mapping[Transport, int]  # how many go each way; of weights, how many workers get them so
    bytes_per_item: float | None = None  # None: nobody has measured or declared it

    @property
    def stored(self) -> int:
        """How many blocks go through an object store."""
        return sum(number for way, number in self.blocks.items() if way is not Transport.in_process)


@dataclass(frozen=True, slots=True)
class Handover:
    """What the executor does with data under a plan; the routes are read off it."""

    stays: Mapping[str, frozenset[int]]  # by stage: blocks whose data stays in the worker that made it
    fused: frozenset[str]  # loops that are one call per worker
    weights: Mapping[tuple[str, str], tuple[int, tuple[int, ...]]]  # weight edge -> who sends, and to whom
    everything: bool  # all data goes through the store


def handover(workflow: Workflow, plan: Plan, cluster: Cluster) -> Handover:
    """Returns what leaves its worker: what must, or everything if the cluster says so."""
    owners = plan.all_owners(workflow)
    fused = {name: loop for name, loop in workflow.loops.items() if plan.is_fused(loop, workflow, cluster)}
    stays = {stage: _staying(stage, workflow, owners, cluster) for stage in workflow.stages}
    read = {edge.source for edge in workflow.edges}
    for loop in fused.values():  # one call keeps the same blocks of all its sides
        kept = [stays[side] for side in loop.sides if side in read]
        stays |= dict.fromkeys(loop.sides, frozenset.intersection(*kept) if kept else frozenset())
    weights = {}
    for edge in workflow.weight_edges:
        hosts = sorted(set(owners[edge.source]))
        sharing = set() if cluster.always_store else set(hosts)  # who hosts both ends has the new weights already
        weights[edge.source, edge.target] = hosts[0], tuple(sorted(set(owners[edge.target]) - sharing))
    return Handover(stays, frozenset(fused), weights, cluster.always_store)


def _staying(stage: str, workflow: Workflow, owners: Mapping[str, Sequence[int]], cluster: Cluster) -> frozenset[int]:
    """Returns the blocks of a stage whose data is consumed only where it was made."""
    consumers = [owners[edge.target] for edge in workflow.edges if edge.source == stage]
    if cluster.always_store or not consumers:
        return frozenset()
    return frozenset(b for b, maker in enumerate(owners[stage]) if all(where[b] == maker for where in consumers))


def routes(
    workflow: Workflow, plan: Plan, cluster: Cluster, done: Handover, *, one_process: bool = False
) -> list[Route]:
    """Returns the routes of all edges: loops (both ways), data, weights."""
    owners = plan.all_owners(workflow)

    def way(source: int, target: int, stays: bool) -> Transport:
        if one_process or (stays and source == target):
            return Transport.in_process
        near = cluster.place_of(source).node == cluster.place_of(target).node
        return Transport.shared_memory if near else Transport.network

    def counted(source: str, target: str, stays: Callable[[int], bool]) -> dict[Transport, int]:
        ends = enumerate(zip(owners[source], owners[target], strict=True))
        return dict(Counter(way(*hop, stays(block)) for block, hop in ends))

    found: list[Route] = []
    for loop in workflow.loops.values():
        fused = loop.name in done.fused
        for source, target in loop.hops():
            found.append(Route(f"{source} -> {target}", "loop", counted(source, target, lambda _, f=fused: f)))
    for edge in workflow.edges:
        ways = counted(edge.source, edge.target, done.stays[edge.source].__contains__)
        found.append(Route(f"{edge.source} -> {edge.target}", "data", ways, edge.bytes_per_item or None))
    for (source, target), (sender, receivers) in done.weights.items():
        hops = [(sender if worker in receivers else worker, worker) for worker in set(owners[target])]
        ways = dict(Counter(way(*hop, not done.everything) for hop in hops))
        found.append(Route(f"{source} ~> {target}", "weights", ways))
    return found


def with_bytes(found: Sequence[Route], measured: Mapping[tuple[str, str], float]) -> list[Route]:
    """Returns the routes with the bytes per item that a profile has measured, by (source, target)."""
    by_edge = {f"{source} -> {target}": size for (source, target), size in measured.items()}
    return [replace(route, bytes_per_item=by_edge.get(route.edge, route.bytes_per_item)) for route in found]


def lines(found: Sequence[Route]) -> str:
    """Returns the routes for people: "policy -> actor: 2 blocks in_process, 2 blocks network"."""
    return "\n".join(_line(route) for route in found)


def _line(route: Route) -> str:
    what = "workers" if route.kind == "weights" else "blocks"
    ways = ", ".join(f"{number} {what} {way}" for way, number in sorted(route.blocks.items()))
    size = "" if route.bytes_per_item is None else f", {route.bytes_per_item:.0f} bytes per item"
    return f"{route.edge}: {ways}{size}"
