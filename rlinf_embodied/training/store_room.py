"""Whether what a run keeps in Ray's object store has room there, from the run's own sizes: reported before it iterates.

    snapshots   two: an iteration's start, and its end until the start is let go; the first is measured
    weights     a version on its way to other workers, and one per iteration ahead; as profiled, or at most a snapshot
    data        what blocks carry from worker to worker, of every iteration under way; as profiled

All of a snapshot is counted as if it lay in the store of the driver's node: of several nodes each holds a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf_embodied.runtime.transport import Route
from rlinf_embodied.workflow.graph import Workflow


@dataclass(frozen=True, slots=True)
class StoreNeed:
    """Bytes that a run keeps in the store of the driver's node."""

    snapshots: float
    weights: float
    data: float

    @property
    def total(self) -> float:
        return self.snapshots + self.weights + self.data


def store_need(
    workflow: Workflow,
    routes: Sequence[Route],
    staleness: int,
    snapshot_bytes: float,
    weights_bytes: Mapping[tuple[str, str], float],
) -> StoreNeed:
    """Returns what a run keeps in the store.

    Args:
        workflow: that runs.
        routes: of its edges, with their bytes per item where these are known; others count nothing.
        staleness: iterations that are under way in addition to the first.
        snapshot_bytes: of one snapshot; 0 where none are kept.
        weights_bytes: of a version, by (source, target), where that was measured.
    """
    stored = {route.edge: route for route in routes if route.stored}
    weights = sum(
        weights_bytes.get((edge.source, edge.target), snapshot_bytes)
        for edge in workflow.weight_edges
        if f"{edge.source} ~> {edge.target}" in stored
    )
    items = workflow.items_per_block
    data = sum(
        (route.bytes_per_item or 0.0) * items * route.stored for route in stored.values() if route.kind == "data"
    )
    return StoreNeed(2 * snapshot_bytes, (1 + staleness) * weights, (1 + staleness) * data)


def shortage(need: StoreNeed, room: float) -> str:
    """Returns what to tell where a store of `room` bytes is too small, "" where it is not."""
    if need.total <= room:
        return ""
    parts = {"two snapshots": need.snapshots, "weights on their way": need.weights, "data": need.data}
    listed = ", ".join(f"{what} {_megabytes(size)}" for what, size in parts.items() if size)
    return (
        f"warning: the run keeps {_megabytes(need.total)} in Ray's object store ({listed}), which has room for "
        f"{_megabytes(room)}: the rest is written to the disk, which takes longer. Where there is memory, set "
        f"cluster.object_store_bytes={_rounded(need.total)}, or start Ray's nodes with --object-store-memory="
        f"{_rounded(need.total)}; recovery.max_restarts=0 keeps no snapshots"
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def _rounded(size: float) -> int:
    """Returns a quarter more, in whole ten million: the store's blocks do not fill it to the last byte."""
    return int(1.25 * size / 1e7 + 1) * 10_000_000
