"""Which runs measure a workflow: a few small plans, each of which shows every stage at one point of the grid.

collocated on all  ceil(n / D) blocks on each of D devices, all of them at work (they share caches and memory buses)
collocated on one  n blocks on one device
disaggregated      loops with a device for each side, two shards in flight: n / 2 blocks per call while the other works;
                   everything that leaves its worker does so here, so that bytes can be counted
one block          a block on one device, where blocks flow one by one or unlike devices have unequal shares of them
few on one         ceil(n / D) blocks on one device, where n / 2 is another number
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.plan import Devices, Leaf, LoopNode, Node, Plan, Temporal
from rlinf_embodied.workflow.graph import WHOLE, Workflow


@dataclass(frozen=True, slots=True)
class Probe:
    """A plan to be run for its measurements."""

    name: str
    workflow: Workflow
    plan: Plan
    cluster: Cluster

    def devices(self, stage: str) -> int:
        """Returns on how many devices a stage runs."""
        placed = len(self.plan.leaves()[stage].devices)
        return min(placed, self.workflow.most_devices(stage, self.workflow.num_blocks))

    def shards(self, stage: str) -> int:
        """Returns in how many parts a stage is called."""
        return self.plan.shards(stage, self.workflow.num_blocks, self.cluster)

    def blocks_per_call(self, stage: str) -> int:
        """Returns the blocks that the busiest device gets per call."""
        owned = -(-self.workflow.num_blocks // self.devices(stage))
        return -(-owned // self.shards(stage))


def collocated(workflow: Workflow, num_devices: int, name: str = "collocated", cores: Devices = ()) -> Plan:
    """Returns the plan in which every stage is on the first `num_devices` devices, resident, one after the other.

    Args:
        workflow: whose stages.
        num_devices: that count.
        name: of the plan.
        cores: devices beside these, for the stages that run on cores only; as many of them are used.
    """
    everywhere = tuple(range(min(num_devices, workflow.num_blocks)))
    places: dict[str, Devices] = dict.fromkeys(workflow.stages, everywhere)
    places |= dict.fromkeys(workflow.of_cores(), cores[: workflow.num_blocks]) if cores else {}
    return Plan(name, num_devices + len(cores), _tree(workflow, places, 1))


def disaggregated(workflow: Workflow, shards: int, name: str = "disaggregated", cores: Devices = ()) -> Plan:
    """Returns the plan with each loop's opener on device 0 and its other sides on device 1, everything else on both.

    What runs on cores only is on the first of `cores`, and what else there is on device 0.
    """
    both = (0, 1) if workflow.num_blocks > 1 and not cores else (0,)
    places: dict[str, Devices] = dict.fromkeys(workflow.stages, both)
    for loop in workflow.loops.values():
        places |= dict.fromkeys(loop.sides[1:], both[-1:])
    places |= {loop.opener: (0,) for loop in workflow.loops.values()}
    places |= dict.fromkeys(workflow.of_cores(), cores[:1]) if cores else {}
    return Plan(name, 1 + max(device for place in places.values() for device in place), _tree(workflow, places, shards))


def _tree(workflow: Workflow, places: Mapping[str, Devices], shards: int) -> Node:
    """Returns the stages in the order of the edges, one after the other."""
    parts: dict[str, Node] = {}  # a loop goes where the first of its sides would
    for stage in workflow.order():
        loop = workflow.loop_of(stage)
        if loop is None:
            parts[stage] = Leaf(stage, places[stage])
        else:
            parts[loop.name] = LoopNode(loop.name, tuple(Leaf(side, places[side]) for side in loop.sides), shards)
    return Temporal(tuple(parts.values())) if len(parts) > 1 else next(iter(parts.values()))


def probes(workflow: Workflow, cluster: Cluster) -> list[Probe]:
    """Returns the runs that measure a workflow for a cluster, the shortest first."""
    devices = min(cluster.num_computing, workflow.num_blocks)
    cores = cluster.cores_beside if workflow.of_cores() else ()
    one = cores[:1]  # of each class, where there are two
    found = [Probe(f"collocated on {devices}", workflow, collocated(workflow, devices, cores=cores), cluster)]
    if (cluster.num_computing > 1 or cores) and workflow.loops:
        most = min(max(loop.shards) for loop in workflow.loops.values())
        apart = disaggregated(workflow, min(most, 2, workflow.num_blocks), cores=cores)
        found.append(Probe("disaggregated", workflow, apart, cluster))
    if devices > 1 or len(cores) > 1:
        found.append(Probe("collocated on 1", workflow, collocated(workflow, 1, cores=one), cluster))
        few = -(-workflow.num_blocks // devices)
        if few not in {probe.blocks_per_call(s) for probe in found for s in workflow.stages if probe.devices(s) == 1}:
            small = with_blocks(workflow, few)
            found.append(Probe("few on 1", small, collocated(small, 1, cores=one), cluster))
        if few > 1 and (_flows_in_blocks(workflow) or len({group.speed for group in cluster.node_groups()}) > 1):
            single = with_blocks(workflow, 1)
            found.append(Probe("one block", single, collocated(single, 1, cores=one), cluster))
    return found


def _flows_in_blocks(workflow: Workflow) -> bool:
    """Returns whether plans may call stages for single blocks: chunks of a stream, or shards that wait elsewhere.

    A call is priced no lower than the smallest that was measured.
    """
    streams = not workflow.loops and any(edge.allows(1, workflow.num_blocks) for edge in workflow.edges)
    return streams or any(spec.waits for spec in workflow.stages.values())


def switching(probe: Probe) -> Probe:
    """Returns the probe with one stage, or loop, in memory at a time: for devices that do not hold all of them."""
    tree = probe.plan.tree
    apart = replace(tree, resident=False) if isinstance(tree, Temporal) else tree
    return replace(probe, name=f"{probe.name}, switching", plan=replace(probe.plan, tree=apart))


def with_blocks(workflow: Workflow, num_blocks: int) -> Workflow:
    """Returns the workflow with another number of blocks, which flow all at once."""
    edges = tuple(replace(edge, granularities=(WHOLE,)) for edge in workflow.edges)
    loops = {name: replace(loop, max_rounds=1, expected_rounds=1.0) for name, loop in workflow.loops.items()}
    repeat = workflow.repeat and replace(workflow.repeat, max_rounds=1, expected_rounds=1.0)
    stages = {
        n: replace(s, blocks_per_batch=math.gcd(s.blocks_per_batch, num_blocks)) for n, s in workflow.stages.items()
    }
    return replace(workflow, num_blocks=num_blocks, stages=stages, edges=edges, loops=loops, repeat=repeat)


def shortened(workflow: Workflow, share: float) -> Workflow:
    """Returns the workflow with a share of its loops' chunk-steps, at least what stands for all of them."""
    loops = {}
    for name, loop in workflow.loops.items():
        least = loop.typical_steps or loop.chunk_steps
        loops[name] = replace(loop, chunk_steps=min(loop.chunk_steps, max(least, round(share * loop.chunk_steps), 1)))
    return replace(workflow, loops=loops)


def warm_up(workflow: Workflow, chunk_steps: int) -> Workflow:
    """Returns the workflow with loops of a few chunk-steps: what is done once is done then."""
    loops = {n: replace(o, chunk_steps=min(chunk_steps, o.chunk_steps)) for n, o in workflow.loops.items()}
    return replace(workflow, loops=loops)
