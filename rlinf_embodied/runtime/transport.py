"""Which way each edge's data goes, chosen at launch from the placement: plain functions of plan, cluster and session.

`handover` decides what stays in its worker, which the executor obeys; `routes` reports it edge by edge:

    same worker      in_process      a reference; nothing is copied
    same node        shared_memory   packed as numpy into the node's object store, mapped by the reader
    other node       network         the same; the object stores copy it from node to node

`cluster.transport=object_store` sends everything through the store, edges inside a worker too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.workflow.graph import Workflow

Blocks = tuple[int, ...]
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
    reason: str
    blocks: Blocks  # that go this way; () for weights, which are no block's
    hops: tuple[Hop, ...]
    bytes_per_item: float | None  # None: nobody has measured or declared it

    def to_dict(self) -> dict[str, object]:
        """Returns the route as JSON-ready data."""
        return asdict(self)


Choice = tuple[Transport, str]  # and why


def choose(source: int, target: int, cluster: Cluster, *, one_process: bool = False, parted: str = "") -> Choice:
    """Returns how data goes from one worker to another, and why.

    Args:
        source: the worker that made it.
        target: the worker that consumes it.
        cluster: where they run.
        one_process: all workers live in one process (a serial session).
        parted: why data leaves its worker even where both ends are there; "": it does not.
    """
    if one_process:
        return Transport.in_process, "all workers are one process"
    ends = cluster.place_of(source), cluster.place_of(target)
    near = ends[0].node == ends[1].node
    store = Transport.shared_memory if near else Transport.network
    if cluster.always_store:
        return store, "cluster.transport=object_store"
    if source == target:
        return (store, f"same worker, but {parted}") if parted else (Transport.in_process, "same worker")
    on_host = all(place.group.on_host for place in ends)
    where = "same node" if near else "other node"
    return store, f"{where}, CPU tensors" if on_host else f"{where}, through the host's memory"


@dataclass(frozen=True, slots=True)
class Handover:
    """What the executor does with data under a plan; the routes are read off it."""

    stays: Mapping[str, frozenset[int]]  # by stage: blocks whose data stays in the worker that made it
    fused: frozenset[str]  # loops that are one call per worker
    weights: Mapping[tuple[str, str], tuple[int, tuple[int, ...]]]  # weight edge -> who sends, and to whom


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
    return Handover(stays, frozenset(fused), weights)


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
        one_process: see `choose`.
    """
    owners = plan.all_owners(workflow)

    def pick(hop: Hop, parted: str) -> Choice:
        return choose(*hop, cluster, one_process=one_process, parted=parted)

    found: list[Route] = []
    for loop in workflow.loops.values():
        for source, target in loop.hops():
            hops = list(zip(owners[source], owners[target], strict=True))
            parted = "" if loop.name in done.fused else "the loop is a call per step"
            found += _grouped(f"{source} -> {target}", "loop", hops, [pick(hop, parted) for hop in hops])
    for edge in workflow.edges:
        hops, stays = list(zip(owners[edge.source], owners[edge.target], strict=True)), done.stays[edge.source]
        choices = [pick(hop, "" if b in stays else "it is consumed elsewhere too") for b, hop in enumerate(hops)]
        found += _grouped(f"{edge.source} -> {edge.target}", "data", hops, choices, edge.bytes_per_item or None)
    for (source, target), (sender, receivers) in done.weights.items():
        hops = [(sender if worker in receivers else worker, worker) for worker in sorted(set(owners[target]))]
        rows = _grouped(f"{source} ~> {target}", "weights", hops, [pick(hop, "") for hop in hops])
        found += [replace(route, blocks=()) for route in rows]
    return found


def with_bytes(found: Sequence[Route], measured: Mapping[tuple[str, str], float]) -> list[Route]:
    """Returns the routes with the bytes per item that a profile has measured, by (source, target)."""
    by_edge = {f"{source} -> {target}": size for (source, target), size in measured.items()}
    return [replace(route, bytes_per_item=by_edge.get(route.edge, route.bytes_per_item)) for route in found]


def _grouped(
    edge: str, kind: str, hops: Sequence[Hop], choices: Sequence[Choice], size: float | None = None
) -> list[Route]:
    """Returns one route per way that the hops (one per block) of an edge go."""
    by_choice: dict[Choice, list[int]] = {}
    for place, choice in enumerate(choices):
        by_choice.setdefault(choice, []).append(place)
    return [
        Route(edge, kind, *choice, tuple(places), tuple(sorted({hops[place] for place in places})), size)
        for choice, places in by_choice.items()
    ]


def table(found: Sequence[Route]) -> str:
    """Returns the routes as aligned lines: edge, workers, blocks, transport, bytes per item, reason."""
    header = ("edge", "workers", "blocks", "transport", "bytes/item", "why")
    rows = [header, *(_row(route) for route in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(route: Route) -> tuple[str, ...]:
    shown = [f"{a}->{b}" for a, b in route.hops[:4]] + (["..."] if len(route.hops) > 4 else [])
    size = "?" if route.bytes_per_item is None else f"{route.bytes_per_item:.0f}"
    return (route.edge, " ".join(shown), str(len(route.blocks) or "-"), str(route.transport), size, route.reason)
