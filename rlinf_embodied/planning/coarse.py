"""Reduces large planning problems: groups of identical devices become one unit each, and several blocks one block.

A unit of k devices takes as long as one of them, since blocks are grouped by the same factor.  `scale` corrects the
two inputs of a simulation that change: the number of devices on which a stage's times depend, and the driver's calls.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from rlinf_embodied.cluster.hardware import Cluster, NodeGroup
from rlinf_embodied.planning.plan import Devices, Item, Place, Plan, whole, with_lent
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.workflow.graph import Workflow

MOST_DEVICES = 16  # that a search distinguishes; more only if there are more groups of identical nodes
MOST_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Coarse:
    """A pricer for units, and the devices of each unit."""

    pricer: Pricer
    members: tuple[Devices, ...]
    blocks: int  # number of original blocks in one block of the reduced workflow

    def expanded(self, plan: Plan, of: Pricer) -> Plan:
        """Returns the plan of devices for a plan of units; blocks are as even as possible if they do not divide."""
        work = of.workflow
        items = []
        for item in plan.items:
            chunks = item.chunks if work.num_blocks % item.chunks == 0 else 1
            places = tuple(self._expanded(place, chunks, work) for place in item.places)
            streams = chunks > 1 or item.chunks == 1
            items += [Item(places, chunks, item.shards)] if streams else [Item((place,)) for place in places]
        return replace(plan, num_devices=of.cluster.num_devices, items=tuple(items))

    def _expanded(self, place: Place, chunks: int, work: Workflow) -> Place:
        most = work.most_devices(place.stage, work.num_blocks // chunks)
        spec = work.stages[place.stage]
        each = spec.devices_per_worker
        workers = whole(tuple(device for unit in place.devices for device in self.members[unit]), each)
        most, devices = most // each, with_lent(workers, each)
        if len(workers) > most:  # at a regular interval, so that each unit keeps its part
            return Place(place.stage, with_lent((workers[i * len(workers) // most] for i in range(most)), each))
        if each > 1:
            return Place(place.stage, devices)
        batch = spec.blocks_per_batch
        of_units = [n * self.blocks // len(self.members[d]) for n, d in zip(place.blocks, place.devices, strict=False)]
        blocks = tuple(n for n, d in zip(of_units, place.devices, strict=False) for _ in self.members[d])
        unit = batch if batch > 1 else chunks
        fits = sum(blocks) == work.num_blocks and not any(n % unit for n in blocks) and min(blocks) > 0
        return Place(place.stage, devices, blocks if fits else ())


def coarse(pricer: Pricer) -> Coarse | None:
    """Returns the reduced problem, or None if the problem is small enough without."""
    cluster, work = pricer.cluster, pricer.workflow
    if cluster.num_devices <= MOST_DEVICES and work.num_blocks <= MOST_BLOCKS:
        return None
    sizes = [group.num_devices for group in pricer.groups]
    several = {name: spec.devices_per_worker for name, spec in work.stages.items() if spec.devices_per_worker > 1}
    size = step = math.lcm(*several.values())  # units of whole workers
    while sum(-(-number // size) for number in sizes) > max(MOST_DEVICES, len(sizes)):
        size += step
    units = [max(1, number // size) for number in sizes]
    members = []
    for devices, number in zip(cluster.group_devices(), units, strict=True):
        ends = [devices.start + step * (len(devices) // step * i // number) for i in range(number)] + [devices.stop]
        members += [tuple(range(a, b)) for a, b in itertools.pairwise(ends)]
    scale = cluster.num_devices / len(members)
    blocks = min(max(round(scale), -(-work.num_blocks // MOST_BLOCKS)), work.num_blocks)
    number = max(1, work.num_blocks // blocks)
    batches = {n: math.gcd(-(-spec.blocks_per_batch // blocks), number) for n, spec in work.stages.items()}
    merged = replace(
        work,
        num_blocks=number,
        stages={n: replace(s, blocks_per_batch=batches[n], devices_per_worker=1) for n, s in work.stages.items()},
        items_per_block=max(1, round(work.items_per_block * blocks / scale)),
    )
    changed = pricer.with_(
        workflow=merged, cluster=_of_units(cluster, units), scale=pricer.scale * scale, devices_per_worker=several
    )
    return Coarse(changed, tuple(members), blocks)


def _of_units(cluster: Cluster, units: list[int]) -> Cluster:
    """Returns a cluster with this number of devices in each group, spread over its nodes."""
    groups: list[NodeGroup] = []
    for group, number in zip(cluster.node_groups(), units, strict=True):
        nodes = math.gcd(number, group.num_nodes) if group.beside is None else groups[group.beside].num_nodes
        if number % nodes:
            nodes = 1
        each = number // nodes
        cores = max(1, round(group.cores_per_device * each))
        groups.append(replace(group, num_nodes=nodes, devices_per_node=each, cores_per_node=cores))
    fits = all(g.beside is None or groups[g.beside].num_nodes == g.num_nodes for g in groups)
    groups = groups if fits else [replace(g, beside=None) for g in groups]
    return replace(cluster, num_devices=sum(units), groups=tuple(groups))
