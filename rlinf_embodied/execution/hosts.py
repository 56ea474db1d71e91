"""Which workers host the stages of a workflow and their blocks, as a plan says."""

from __future__ import annotations

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.schedule import shards_of
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.workflow.graph import Workflow


class Hosts:
    """The plan, as workers and blocks."""

    def __init__(self, workflow: Workflow, plan: Plan, cluster: Cluster) -> None:
        """Takes whose stages are hosted, where, and what the workers run on."""
        self.owners = plan.all_owners(workflow)  # by stage: the worker of each block
        self._workflow, self._plan, self._cluster = workflow, plan, cluster
        self._exclusive = plan.excluded()

    def workers(self, stage: str) -> list[int]:
        """Returns the workers that host a stage, in the order of its group's ranks."""
        return sorted(set(self.owners[stage]))

    def blocks(self, stage: str, worker: int) -> tuple[int, ...]:
        """Returns the blocks of a stage that a worker owns."""
        return tuple(block for block, owner in enumerate(self.owners[stage]) if owner == worker)

    def shards(self, stage: str, num_shards: int) -> list[set[int]]:
        """Returns the blocks of each shard, of all workers of a stage."""
        parts = [shards_of(self.blocks(stage, worker), num_shards) for worker in self.workers(stage)]
        return [{block for part in parts for block in part[k]} for k in range(num_shards)]

    def switching(self, stage: str) -> list[int]:
        """Returns the workers of a stage that host another one which must leave the device's memory for it."""
        return [worker for worker in self.workers(stage) if self._exclusive[stage] & self._hosted(worker)]

    def contexts(self, name: str) -> list[StageContext]:
        """Returns the context of each worker of a stage, in the order of ranks; groups come later."""
        cluster, workers = self._cluster, self.workers(name)
        owners = tuple(workers.index(owner) for owner in self.owners[name])
        contexts, num_blocks = [], self._workflow.num_blocks
        parts = self._plan.shards(name, self._workflow, cluster)
        for worker in workers:
            blocks = self.blocks(name, worker)
            shards = tuple(shard for shard in shards_of(blocks, parts) if shard)
            device = cluster.torch_device(worker)
            contexts.append(StageContext(worker, device, blocks, shards, num_blocks, owners, SoloGroup(), {}))
            contexts[-1].exclusive = self._exclusive[name] & self._hosted(worker)
        return contexts

    def _hosted(self, worker: int) -> frozenset[str]:
        return frozenset(stage for stage, owners in self.owners.items() if worker in owners)
