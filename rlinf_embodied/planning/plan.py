"""A plan is a list: items in their order, each with stages on devices.

    Plan("mine", 4, (
        Item((Place("env", (0, 1)), Place("policy", (2, 3))), shards=2),     a loop: both sides, blocks in 2 shards
        Item((Place("reward", (0, 1)), Place("critic", (2, 3))), chunks=4),  stages that stream to each other
        Item((Place("actor", (0, 1, 2, 3), (3, 3, 1, 1)),)),                 one stage; blocks of each device
    ))

Calls are submitted item by item.  A device processes its calls in this order, and a call waits for its inputs.  So
neighbouring items on different devices overlap.  notation.py reads and prints plans as text; check.py checks them
against a workflow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlinf_embodied.workflow.graph import Loop, Workflow

Devices = tuple[int, ...]
Blocks = tuple[int, ...]
Pairs = tuple[tuple[str, str], ...]


class Kind(StrEnum):
    """A description of how a plan shares devices among stages."""

    collocated = "collocated"  # all stages on the same devices
    disaggregated = "disaggregated"  # groups of stages, each on the same devices, which no other group uses
    hybrid = "hybrid"  # anything else


@dataclass(frozen=True, slots=True)
class Place:
    """A stage on its devices, with the number of blocks of each worker; (): as even as possible."""

    stage: str
    devices: Devices
    blocks: Blocks = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One stage, the sides of a loop, or several stages that stream to each other in chunks."""

    places: tuple[Place, ...]
    chunks: int = 1
    shards: int = 1

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(place.stage for place in self.places)


@dataclass(frozen=True, slots=True)
class Plan:
    """Items in their order, on a cluster of `num_devices` devices.

    Stages of an exclusive pair are never in a device's memory together: one is offloaded when the other is called.
    With a staleness of k, rollouts use weights that are up to k iterations older, and run that far ahead.
    """

    name: str
    num_devices: int
    items: tuple[Item, ...]
    exclusive: Pairs = ()
    staleness: int = 0

    def places(self) -> dict[str, Place]:
        return {place.stage: place for item in self.items for place in item.places}

    def item_of(self, stage: str) -> Item:
        return next(item for item in self.items if stage in item.stages)

    def devices(self) -> Devices:
        return tuple(sorted({device for place in self.places().values() for device in place.devices}))

    def owners(self, stage: str, workflow: Workflow) -> Devices:
        place, chunk = leading(self.places()[stage], workflow), workflow.num_blocks // self.item_of(stage).chunks
        return owners(place, workflow.num_blocks, chunk, workflow.stages[stage].blocks_per_batch)

    def is_fused(self, loop: Loop, workflow: Workflow) -> bool:
        """Returns whether a loop is one call per worker."""
        return fused(tuple(leading(self.places()[side], workflow) for side in loop.sides), workflow.num_blocks)

    def shards(self, stage: str, workflow: Workflow) -> int:
        """Returns the number of parts in which a stage gets its blocks: the shards of its loop, or 1."""
        loop = workflow.loop_of(stage)
        return 1 if loop is None or self.is_fused(loop, workflow) else self.item_of(stage).shards

    def excluded(self) -> dict[str, frozenset[str]]:
        """Returns for each stage those that may not be in memory together with it."""
        return excluded_by(self.exclusive, self.places())

    def kind(self, workflow: Workflow) -> Kind:
        """Returns the word for the plan; stages that run on cores next to accelerators do not count."""
        on_cores = set(workflow.of_cores())
        places = self.places()
        counted = {device for stage, place in places.items() if stage not in on_cores for device in place.devices}
        groups = {frozenset(p.devices) for s, p in places.items() if s not in on_cores or counted & set(p.devices)}
        if len(groups) <= 1:
            return Kind.collocated
        disjoint = all(a.isdisjoint(b) for a, b in itertools.combinations(groups, 2))
        return Kind.disaggregated if disjoint else Kind.hybrid


def excluded_by(pairs: Iterable[tuple[str, str]], stages: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns for each stage those that may not be in memory together with it, given the exclusive pairs."""
    excluded: dict[str, set[str]] = {stage: set() for stage in stages}
    for a, b in pairs:
        excluded[a].add(b)
        excluded[b].add(a)
    return {stage: frozenset(others) for stage, others in excluded.items()}


def sorted_pairs(pairs: Iterable[tuple[str, str]]) -> Pairs:
    """Returns pairs in a canonical form, so that equal sets of pairs compare equal."""
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs}))


def whole(devices: Collection[int], per_worker: int) -> Devices:
    """Returns the first device of each complete group of `per_worker` neighbours, whose first is a multiple of it."""
    return tuple(d for d in devices if d % per_worker == 0 and all(d + k in devices for k in range(per_worker)))


def with_lent(workers: Iterable[int], per_worker: int) -> Devices:
    """Returns the devices of these workers: the inverse of `whole`."""
    return tuple(device for worker in workers for device in range(worker, worker + per_worker))


def leading(place: Place, workflow: Workflow) -> Place:
    """Returns the place without lent devices."""
    number = workflow.stages[place.stage].devices_per_worker
    return place if number == 1 else replace(place, devices=place.devices[::number])


def owners(place: Place, num_blocks: int, chunk: int = 0, blocks_per_batch: int = 1) -> Devices:
    """Returns the device that owns each block: contiguous within a chunk, in the place's proportions or evenly.

    The blocks of a batch have one owner, whatever the chunks.  Each chunk has the place's proportions: (4, 2) of six
    blocks in two chunks is 0 0 1 0 0 1.
    """
    devices, chunk = place.devices, chunk or num_blocks
    if place.blocks:
        chunk = num_blocks if blocks_per_batch > 1 else chunk
        sizes = [blocks * chunk // num_blocks for blocks in place.blocks]
        of_chunk = [device for device, size in zip(devices, sizes, strict=True) for _ in range(size)]
        return tuple(of_chunk) * (num_blocks // chunk)
    if blocks_per_batch > 1:
        batches = num_blocks // blocks_per_batch
        return tuple(devices[block // blocks_per_batch * len(devices) // batches] for block in range(num_blocks))
    return tuple(devices[block % chunk * len(devices) // chunk] for block in range(num_blocks))


@functools.lru_cache(maxsize=1 << 16)  # a search asks for the same ones again and again
def fused(sides: tuple[Place, ...], num_blocks: int) -> bool:
    """Returns whether both sides of a loop have the same blocks on the same devices."""
    return len({owners(side, num_blocks) for side in sides}) == 1


@dataclass(frozen=True, slots=True)
class Step:
    """One stage (or all sides of a loop) called for one chunk of the blocks."""

    stages: tuple[str, ...]
    chunk: int = 0
    num_chunks: int = 1
    shards: int = 1


def schedule(items: Sequence[Item], workflow: Workflow) -> tuple[Step, ...]:
    """Returns the steps of one iteration in the order of their submission: chunk by chunk inside an item.

    A stage that works on all its blocks at once does not alternate with its neighbours: all its steps are consecutive.
    """
    steps: list[Step] = []
    for item in items:
        if item.chunks == 1 or len(item.places) == 1:
            steps += [Step(item.stages, k, item.chunks, item.shards) for k in range(item.chunks)]
            continue
        for _, run in itertools.groupby(item.stages, key=lambda s: s if workflow.stages[s].at_once else ""):
            stages = tuple(run)
            steps += [Step((stage,), k, item.chunks) for k in range(item.chunks) for stage in stages]
    return tuple(steps)


def in_order(workflow: Workflow, places: Mapping[str, Place], shards: int = 1) -> tuple[Item, ...]:
    """Returns items with one stage or loop each, in the order of the edges."""
    items: dict[str, Item] = {}
    for stage in workflow.order():
        loop = workflow.loop_of(stage)
        sides = (stage,) if loop is None else loop.sides
        items.setdefault(sides[0], Item(tuple(places[s] for s in sides), shards=1 if loop is None else shards))
    return tuple(items.values())


def collocated(workflow: Workflow, num_devices: int, name: str = "collocated", cores: Devices = ()) -> Plan:
    """Returns the plan in which every stage is on the first `num_devices` devices, resident, one after the other.

    Stages that run on cores only are on `cores`, additional devices, if there are any.
    """
    on_cores = workflow.of_cores() if cores else ()
    devices = {stage: cores if stage in on_cores else tuple(range(num_devices)) for stage in workflow.stages}
    plan = placed(workflow, devices, name)
    return replace(plan, num_devices=max(plan.num_devices, num_devices + len(cores)))


def placed(workflow: Workflow, devices: Mapping[str, Devices], name: str, shards: int = 1) -> Plan:
    """Returns the plan with each stage on these devices, or as many of them as its blocks suffice for.

    A stage whose workers have several devices is on the complete groups of these, or on the group of the first one.
    """
    places = {}
    for stage, on in devices.items():
        each = workflow.stages[stage].devices_per_worker
        fitting = with_lent(whole(on, each) or (on[0] - on[0] % each,), each)
        places[stage] = Place(stage, fitting[: workflow.most_devices(stage)])
    number = 1 + max(device for place in places.values() for device in place.devices)
    return Plan(name, number, in_order(workflow, places, shards))
