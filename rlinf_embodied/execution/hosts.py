"""Maps the stages of a plan and their blocks to workers, and decides which data leaves its worker.

Data that is consumed only in the worker that produced it stays there, by reference.  All other data goes through the
object store of a node, packed as numpy, and from there to the stores of other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.workflow.graph import Workflow


def shards_of(blocks: tuple[int, ...], num_shards: int) -> tuple[tuple[int, ...], ...]:
    """Returns `blocks` in `num_shards` shards, round robin.

    With contiguous shards, a shard's blocks would belong to few workers of each side, and the others would idle.  Round
    robin, every worker of both sides has an even part of every shard.
    """
    return tuple(tuple(block for block in blocks if block % num_shards == k) for k in range(num_shards))


class Hosts:
    """The plan, as workers and blocks."""

    def __init__(self, workflow: Workflow, plan: Plan, cluster: Cluster) -> None:
        self.owners = {stage: plan.owners(stage, workflow) for stage in workflow.stages}  # the worker of each block
        self._workflow, self._plan, self._cluster = workflow, plan, cluster
        self._exclusive = plan.excluded()
        self.blocks: dict[str, dict[int, tuple[int, ...]]] = {}  # by stage and worker, in the order of workers
        for stage, owners in self.owners.items():
            blocks: dict[int, list[int]] = {worker: [] for worker in sorted(set(owners))}
            for block, worker in enumerate(owners):
                blocks[worker].append(block)
            self.blocks[stage] = {worker: tuple(owned) for worker, owned in blocks.items()}
        self._require_nodes()
        self.fused = {name for name, loop in workflow.loops.items() if plan.is_fused(loop, workflow)}  # one call each
        self.stays = {stage: self._staying(stage) for stage in workflow.stages}  # blocks that do not leave their worker
        read = {edge.source for edge in workflow.edges}
        for loop in (workflow.loops[name] for name in self.fused):  # one call keeps the same blocks of both sides
            kept = [self.stays[side] for side in loop.sides if side in read]
            self.stays |= dict.fromkeys(loop.sides, frozenset.intersection(*kept) if kept else frozenset())

    def _staying(self, stage: str) -> frozenset[int]:
        """Returns the blocks of a stage whose data is consumed only in the worker that produces it."""
        consumers = [self.owners[edge.target] for edge in self._workflow.edges if edge.source == stage]
        owners: Sequence[int] = self.owners[stage] if consumers else ()
        return frozenset(b for b, owner in enumerate(owners) if all(targets[b] == owner for targets in consumers))

    def _require_nodes(self) -> None:
        for stage in self.blocks:
            for devices in self.devices_of(stage).values():
                if len({self._cluster.place_of(device).node for device in devices}) > 1:
                    raise PlanError(
                        f"plan {self._plan.name} gives a worker of {stage} the devices {[*devices]}, which are on "
                        "different nodes: use devices of one node, or a number for each worker that divides a node's"
                    )

    def devices_of(self, stage: str) -> dict[int, range]:
        """Returns the devices of each worker of a stage: its own, and those lent to it."""
        return {worker: self._workflow.stages[stage].devices_of(worker) for worker in self.blocks[stage]}

    def switching(self, stage: str) -> list[int]:
        """Returns the workers of a stage that also host a stage which excludes it from the device's memory."""
        return [worker for worker in self.blocks[stage] if self._excluded(stage, worker)]

    def contexts(self, name: str) -> list[StageContext]:
        """Returns the context of each worker of a stage, in the order of ranks; groups come later."""
        cluster, workers = self._cluster, list(self.blocks[name])
        owners = tuple(workers.index(owner) for owner in self.owners[name])
        parts = self._plan.shards(name, self._workflow)
        return [
            StageContext(
                worker=worker,
                device=cluster.torch_device(worker),
                blocks=blocks,
                shards=tuple(shard for shard in shards_of(blocks, parts) if shard),
                num_blocks=self._workflow.num_blocks,
                owners=owners,
                exclusive=self._excluded(name, worker),
            )
            for worker, blocks in self.blocks[name].items()
        ]

    def lending(self, name: str, context: StageContext) -> list[StageContext]:
        """Returns the contexts of the devices that are lent to a worker, given its own."""
        return [
            replace(context, worker=d, device=self._cluster.torch_device(d), exclusive=self._excluded(name, d))
            for d in self.devices_of(name)[context.worker][1:]
        ]

    def _excluded(self, stage: str, device: int) -> frozenset[str]:
        """Returns the stages that use a device and exclude this one from its memory."""
        first = {o: device - device % self._workflow.stages[o].devices_per_worker for o in self._exclusive[stage]}
        return frozenset(other for other, worker in first.items() if worker in self.blocks[other])
