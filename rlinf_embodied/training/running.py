"""The stages of a training that are up, and the copies of its weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.execution import snapshots
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import Pace, Snapshot
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.runtime.transport import Route
from rlinf_embodied.training.job import Checking, Evaluating, Job, Progress
from rlinf_embodied.workflow.graph import Workflow


@dataclass(slots=True)
class Running:
    """The stages that are up: they change with the plan, the workers stay."""

    job: Job
    session: Session
    executor: Executor
    evaluation: Evaluating
    checking: Checking | None  # where the run has a goal
    folder: Path  # what every copy of the policy was loaded from
    checkpoint: Path | None  # what the other state was loaded from
    snapshot: Snapshot | None = None  # the newest; None: none are kept
    saved: Progress | None = None  # of the run when it was taken
    pace: Pace = field(default_factory=Pace)  # of snapshots

    def become(self, other: Running) -> None:
        """Takes over the stages of another."""
        self.executor, self.evaluation, self.checking = other.executor, other.evaluation, other.checking
        self.folder, self.checkpoint, self.snapshot = other.folder, other.checkpoint, other.snapshot
        if other.saved is not None:  # it has taken a snapshot; otherwise it was built from this one's
            self.saved, self.pace = other.saved, other.pace

    def take_snapshot(self, progress: Progress) -> float:
        """Takes a snapshot of the stages' state at this progress; returns the seconds that it took."""
        start = time.time()
        known = None if self.snapshot is None else self.snapshot.states
        self.snapshot = snapshots.take(self.session, self.executor, progress.iteration, known)
        self.saved = copy.deepcopy(progress)
        self.pace.taken(time.time() - start)
        return self.pace.cost_s

    def repeat_until(self, iteration: int) -> None:
        """Runs the iterations since the snapshot again, after it was restored; what they report is known already."""
        progress = copy.deepcopy(self.saved)
        while progress is not None and progress.iteration < iteration:
            self.job.run_iteration(self.executor, progress)
            progress.iteration += 1

    def store_shortage(self, routes: Sequence[Route], weights_bytes: Mapping[tuple[str, str], float]) -> str:
        """Returns what to tell where the object store is too small for what this run keeps there, "" where it is not.

        Args:
            routes: of the workflow's edges.
            weights_bytes: of a version, by (source, target), where that was measured.
        """
        states = {} if self.snapshot is None else self.snapshot.states
        stored = self.session.stored([ref for refs in states.values() for ref in refs])
        if stored is None:
            return ""
        need = store_need(self.executor.workflow, routes, self.executor.plan.staleness, stored.taken, weights_bytes)
        return shortage(need, stored.room)

    def refresh(self, step: int) -> None:
        """Sends all that the actor holds to copies outside training; later on it may send what changed only."""
        for stages in (self.evaluation, self.checking) if self.checkpoint is not None else ():
            if stages is not None:
                self.update(stages, step)

    def update(self, stages: Evaluating | Checking, step: int) -> None:
        """Sends the learners' weights to those workers of the stages that do not share them."""
        for learner in self.job.learners:
            hosts = self.executor.workers(learner)
            missing = [worker for worker in stages.executor.workers(stages.stage) if worker not in hosts]
            if missing:
                self.executor.send_weights(learner, stages.stage, missing, StepContext(step))


# --------------------------------------------------------------------------------------------------- the object store
def store_need(
    workflow: Workflow,
    routes: Sequence[Route],
    staleness: int,
    snapshot_bytes: float,
    weights_bytes: Mapping[tuple[str, str], float],
) -> dict[str, float]:
    """Returns the bytes that a run keeps in Ray's store, by what they are; of several nodes each holds a part.

    Args:
        workflow: that runs.
        routes: of its edges, with their bytes per item where these are known; others count nothing.
        staleness: iterations that are under way in addition to the first.
        snapshot_bytes: of one snapshot, of which there are two for a while; 0 where none are kept.
        weights_bytes: of a version, by (source, target), where that was measured; otherwise at most a snapshot.
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
    ahead = 1 + staleness
    return {"two snapshots": 2 * snapshot_bytes, "weights on their way": ahead * weights, "data": ahead * data}


def shortage(need: Mapping[str, float], room: float) -> str:
    """Returns what to report where a store of `room` bytes is too small, "" where it is not."""
    total = sum(need.values())
    if total <= room:
        return ""
    listed = ", ".join(f"{what} {_megabytes(size)}" for what, size in need.items() if size)
    size = int(1.25 * total / 1e7 + 1) * 10_000_000  # a quarter more: the store's blocks do not fill it completely
    return (
        f"warning: the run keeps {_megabytes(total)} in Ray's object store ({listed}), which has room for "
        f"{_megabytes(room)}: the rest is written to the disk, which takes longer. Where there is memory, set "
        f"cluster.object_store_bytes={size}, or start Ray's nodes with --object-store-memory={size}; "
        "recovery.max_restarts=0 keeps no snapshots"
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
