"""Which way each edge's data goes, chosen at launch from the placement: plain functions of plan, cluster and session.

`handover` decides what stays in its worker, which the executor obeys; `routes` reports it edge by edge:

    same worker      in_process      a reference; nothing is copied
    same node        shared_memory   packed as numpy into the node's object store, mapped by the reader
    other node       network         the same; the object stores copy it from node to node

Data that is consumed elsewhere too, and messages of a loop that is a call per step, leave their worker for all.
`cluster.transport=object_store` sends everything through the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.workflow.graph import Workflow

Hop = tuple[int, int]  # worker to worker


class Transport(StrEnum):
    """How a payload gets from worker to worker."""

    in_process = "in_process"
    shared_memory = "shared_memory"
    network = "network"


@dataclass(frozen=True, slots=True)
class Route:
    """All hops of one edge that go the same way; an edge whose blocks go different ways has several."""

    edge: str  # "policy -> actor"
    kind: str  # data, loop or weights
    transport: Transport
    blocks: tuple[int, ...]  # that go this way; () for weights, which are no block's
    hops: tuple[Hop, ...]
    bytes_per_item: float | None  # None: nobody has measured or declared it

    def to_dict(self) -> dict[str, object]:
        """Returns the route as JSON-ready data."""
        return asdict(self)


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
    """Returns the routes of all edges: loops (both ways), data, weights.

    Args:
        workflow: whose edges.
        plan: which worker hosts what.
        cluster: where these workers run.
        done: what the executor does with the data.
        one_process: all workers live in one process (a serial session).
    """
    owners = plan.all_owners(workflow)

    def way(hop: Hop, stays: bool) -> Transport:
        if one_process or (stays and hop[0] == hop[1]):
            return Transport.in_process
        near = cluster.place_of(hop[0]).node == cluster.place_of(hop[1]).node
        return Transport.shared_memory if near else Transport.network

    found: list[Route] = []
    for loop in workflow.loops.values():
        fused = loop.name in done.fused
        for source, target in loop.hops():
            hops = list(zip(owners[source], owners[target], strict=True))
            found += _grouped(f"{source} -> {target}", "loop", ((way(hop, fused), hop) for hop in hops))
    for edge in workflow.edges:
        hops, stays = zip(owners[edge.source], owners[edge.target], strict=True), done.stays[edge.source]
        ways = ((way(hop, block in stays), hop) for block, hop in enumerate(hops))
        found += _grouped(f"{edge.source} -> {edge.target}", "data", ways, edge.bytes_per_item or None)
    for (source, target), (sender, receivers) in done.weights.items():
        hops = [(sender if worker in receivers else worker, worker) for worker in sorted(set(owners[target]))]
        ways = ((way(hop, not done.everything), hop) for hop in hops)
        found += [replace(route, blocks=()) for route in _grouped(f"{source} ~> {target}", "weights", ways)]
    return found


def with_bytes(found: Sequence[Route], measured: Mapping[tuple[str, str], float]) -> list[Route]:
    """Returns the routes with the bytes per item that a profile has measured, by (source, target)."""
    by_edge = {f"{source} -> {target}": size for (source, target), size in measured.items()}
    return [replace(route, bytes_per_item=by_edge.get(route.edge, route.bytes_per_item)) for route in found]


def _grouped(edge: str, kind: str, hops: Iterable[tuple[Transport, Hop]], size: float | None = None) -> list[Route]:
    """Returns one route per way that the hops (one per block) of an edge go."""
    groups: dict[Transport, dict[int, Hop]] = {}
    for block, (transport, hop) in enumerate(hops):
        groups.setdefault(transport, {})[block] = hop
    return [
        Route(edge, kind, transport, tuple(group), tuple(sorted(set(group.values()))), size)
        for transport, group in groups.items()
    ]


def table(found: Sequence[Route]) -> str:
    """Returns the routes as aligned lines: edge, workers, blocks, transport, bytes per item."""
    rows = [("edge", "workers", "blocks", "transport", "bytes/item"), *(_row(route) for route in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(route: Route) -> tuple[str, ...]:
    hops = [f"{a}->{b}" for a, b in route.hops[:4]] + (["..."] if len(route.hops) > 4 else [])
    size = "?" if route.bytes_per_item is None else f"{route.bytes_per_item:.0f}"
    return (route.edge, " ".join(hops), str(len(route.blocks) or "-"), str(route.transport), size)
