"""What a search tries next to a sketch: other devices, chunks, shards, neighbours joined or parted, another order.

Where devices are unlike, other shares of the blocks, too: see shares.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.shares import ShareMoves, Slowdown, all_alike
from rlinf_embodied.planning.sketch import Item, Sketch, single
from rlinf_embodied.planning.tree import Devices
from rlinf_embodied.workflow.graph import Workflow


class Moves:
    """The neighbours of a sketch, for one workflow and cluster."""

    def __init__(self, workflow: Workflow, cluster: Cluster, slowdown: Slowdown = all_alike) -> None:
        """Takes what is planned, and how much longer a stage takes on a device than elsewhere."""
        self.work, self.everywhere = workflow, tuple(range(cluster.num_devices))
        self.shares = ShareMoves(workflow, self.everywhere, slowdown)
        places = [cluster.place_of(device) for device in self.everywhere]
        self.kinds = [(place.node, place.group) for place in places]  # devices of one kind in one node are alike
        nodes = {p.node: tuple(d for d in self.everywhere if places[d].node == p.node) for p in places}
        self.pool = [*((d,) for d in self.everywhere), *nodes.values(), self.everywhere]  # where a kick puts a stage
        blocks = workflow.num_blocks
        self.chunks = [k for k in range(2, blocks + 1) if blocks % k == 0]
        self.number = {stage: i for i, stage in enumerate(workflow.stages)}
        self.loops = {loop.opener: loop.sides for loop in workflow.loops.values()}
        self.shards = [loop.shards for loop in workflow.loops.values()]

    def around(self, sketch: Sketch) -> Iterator[Sketch]:
        """Yields the sketches one move away that can run, possibly more than once."""
        parts = self._devices(sketch), self._forms(sketch), self._orders(sketch), self._shards(sketch)
        tried = itertools.chain(*parts, self.shares.around(sketch))
        return (other for other in map(self.shares.mended, tried) if self.is_possible(other))

    def kicked(self, sketch: Sketch, draw: random.Random) -> Sketch:
        """Returns a sketch with several stages elsewhere, half of the time without streaming; it may not run."""
        number = len(sketch.devices)
        chosen = draw.sample(range(number), draw.randint(min(2, number), number))
        one, two = self._some(draw), self._some(draw)
        rest = tuple(d for d in self.everywhere if d not in one)
        few = [one, rest if rest and draw.random() < 0.5 else two]
        other = sketch.placed({i: draw.choice(few) for i in chosen})
        if self.shares.unlike and draw.random() < 0.5:
            other = self.shares.by_speed(replace(other, items=_singles(other)))
        if draw.random() < 0.5:
            return other
        return replace(other, items=_singles(other))

    def _some(self, draw: random.Random) -> Devices:
        """Returns a device, a node's, or all of them; or, half of the time, any."""
        if draw.random() < 0.5:
            return draw.choice(self.pool)
        return tuple(sorted(draw.sample(self.everywhere, draw.randint(1, len(self.everywhere)))))

    def is_possible(self, sketch: Sketch) -> bool:
        """Returns whether the executor can run a sketch: as plan_check.py has it."""
        work, units = self.work, sketch.units()
        place = {side: i for i, unit in enumerate(units) for side in self.loops.get(unit, (unit,))}
        pairs = ((place[e.source], place[e.target]) for e in work.edges)
        if any(a > b for a, b in pairs):
            return False
        if any(len(own) > work.most_devices(s, work.num_blocks) for s, own in self._placed(sketch)):
            return False
        if any(shards > work.num_blocks for shards in sketch.shards):
            return False
        return all(self._streams(item, sketch) for item in sketch.items if item.chunks > 1)

    def _placed(self, sketch: Sketch) -> Iterator[tuple[str, Devices]]:
        return zip(self.work.stages, sketch.devices, strict=True)

    def _streams(self, item: Item, sketch: Sketch) -> bool:
        size, work = work_size(self.work, item), self.work
        if len(item.parts) < 2 or any(unit in self.loops for unit in item.units()):
            return False
        used: set[int] = set()
        for part in item.parts:
            own = {device for stage in part for device in sketch.devices[self.number[stage]]}
            if own & used:
                return False
            used |= own
        if not all(work.stages[stage].accepts(size, work.num_blocks) for stage in item.units()):
            return False
        return not any(work.blocking(a, b, size) for a, b in itertools.combinations(item.parts, 2))

    # ------------------------------------------------------------------------------------------------------- devices
    def _devices(self, sketch: Sketch) -> Iterator[Sketch]:
        role = self._roles(sketch)
        for i, own in enumerate(sketch.devices):
            others = [d for d in self.everywhere if d not in own]
            less, more = self._one_of_each(own, role), self._one_of_each(others, role)
            yield from (sketch.placed({i: _with(own, d)}) for d in more)
            if len(own) > 1:
                yield from (sketch.placed({i: _without(own, d)}) for d in less)
            yield from (sketch.placed({i: _with(_without(own, d), e)}) for d in less for e in more)
            for known in {*sketch.devices, self.everywhere}:
                rest = tuple(d for d in self.everywhere if d not in known)
                yield from (sketch.placed({i: taken}) for taken in (known, rest) if taken and taken != own)
        for i, j in itertools.permutations(range(len(sketch.devices)), 2):
            yield from self._between(sketch, i, j, role)

    def _between(self, sketch: Sketch, i: int, j: int, role: Sequence[object]) -> Iterator[Sketch]:
        """Moves devices from one stage to another: one of them, or so that they divide what both have."""
        a, b = sketch.devices[i], sketch.devices[j]
        yield from self._divided(sketch, i, j, a, b)
        if len(a) > 1:
            for device in self._one_of_each([d for d in a if d not in b], role):
                yield sketch.placed({i: _without(a, device), j: _with(b, device)})
                for gone in self._one_of_each([d for d in b if d not in a], role):  # they exchange one
                    yield sketch.placed({i: _with(_without(a, device), gone), j: _with(_without(b, gone), device)})
        if i < j and a != b:
            yield sketch.placed({i: b, j: a})
        if i < j:
            for both in {self.everywhere, tuple(sorted({*a, *b}))}:
                yield sketch.placed({i: both, j: both})

    def _divided(self, sketch: Sketch, i: int, j: int, a: Devices, b: Devices) -> Iterator[Sketch]:
        for both in {tuple(sorted({*a, *b})), self.everywhere}:
            for at in range(1, len(both)):
                yield sketch.placed({i: both[:at], j: both[at:]})

    def _roles(self, sketch: Sketch) -> list[object]:
        """Returns for each device what sets it apart from others: its node and kind, and the stages that it has."""
        hosted = [tuple(i for i, own in enumerate(sketch.devices) if d in own) for d in self.everywhere]
        return list(zip(self.kinds, hosted, strict=True))

    def _one_of_each(self, devices: Sequence[int], role: Sequence[object]) -> list[int]:
        return list({role[d]: d for d in reversed(devices)}.values())

    # --------------------------------------------------------------------------------------------------------- forms
    def _forms(self, sketch: Sketch) -> Iterator[Sketch]:
        for at, item in enumerate(sketch.items):
            if item.chunks > 1:
                yield from (self._with_item(sketch, at, at + 1, [replace(item, chunks=k)]) for k in self.chunks)
                yield self._with_item(sketch, at, at + 1, [single(unit) for unit in item.units()])
                first, last = item.parts[0], item.parts[-1]
                less = replace(item, parts=item.parts[1:]), replace(item, parts=item.parts[:-1])
                yield self._with_item(sketch, at, at + 1, [*(single(unit) for unit in first), less[0]])
                yield self._with_item(sketch, at, at + 1, [less[1], *(single(unit) for unit in last)])
        for at, (one, two) in enumerate(itertools.pairwise(sketch.items)):
            if any(unit in self.loops for unit in (*one.units(), *two.units())):
                continue
            sizes = {one.chunks, two.chunks} - {1} or self.chunks
            for parts, k in itertools.product(self._parts(sketch, one, two), sizes):
                yield self._with_item(sketch, at, at + 2, [Item(k, parts)])
            yield from self._streaming(sketch, at, one, two)

    def _streaming(self, sketch: Sketch, at: int, one: Item, two: Item) -> Iterator[Sketch]:
        """Yields two items that divide the devices and stream to each other."""
        parts = (one.units(), two.units()) if one.chunks == two.chunks == 1 else ()
        for k in self.chunks if parts else ():
            joint = self._with_item(sketch, at, at + 2, [Item(k, parts)])
            i, j = (self.number[units[0]] for units in parts)
            a, b = sketch.devices[i], sketch.devices[j]
            yield from itertools.chain(self._divided(joint, i, j, a, b), self._divided(joint, j, i, a, b))

    def _parts(self, sketch: Sketch, one: Item, two: Item) -> Iterator[tuple[tuple[str, ...], ...]]:
        """Yields the parts of two items side by side, those that share devices as turns.

        Parts in between that have other devices become turns of them, too, or come behind them, or before them.
        """
        found = []
        for taken, behind in ((True, False), (False, True), (False, False)):
            parts: list[tuple[tuple[str, ...], set[int]]] = []
            for part in (*one.parts, *two.parts):
                own = {d for stage in part for d in sketch.devices[self.number[stage]]}
                sharing = [k for k, (_, devices) in enumerate(parts) if own & devices]
                at = sharing[0] if sharing else len(parts)
                turns = [k for k in range(at, len(parts)) if taken or k in sharing]
                stages = tuple(stage for k in turns for stage in parts[k][0])
                others = [parts[k] for k in range(at, len(parts)) if k not in turns]
                joint = (*stages, *part), own.union(*(parts[k][1] for k in turns))
                parts = [*parts[:at], joint, *others] if behind else [*parts[:at], *others, joint]
            found.append(tuple(part for part, _ in parts))
        yield from (parts for parts in dict.fromkeys(found) if len(parts) > 1)

    def _with_item(self, sketch: Sketch, start: int, end: int, items: Sequence[Item]) -> Sketch:
        kept = [single(item.units()[0]) if len(item.units()) == 1 else item for item in items if item.parts]
        return replace(sketch, items=(*sketch.items[:start], *kept, *sketch.items[end:]))

    # ---------------------------------------------------------------------------------------------- orders and shards
    def _orders(self, sketch: Sketch) -> Iterator[Sketch]:
        items = sketch.items
        for at in range(len(items) - 1):
            yield replace(sketch, items=(*items[:at], items[at + 1], items[at], *items[at + 2 :]))
        for at, item in enumerate(items):
            for swapped in _swaps(item.parts):
                yield self._with_item(sketch, at, at + 1, [replace(item, parts=swapped)])
            for k, part in enumerate(item.parts):
                for swapped in _swaps(part):
                    parts = (*item.parts[:k], swapped, *item.parts[k + 1 :])
                    yield self._with_item(sketch, at, at + 1, [replace(item, parts=parts)])

    def _shards(self, sketch: Sketch) -> Iterator[Sketch]:
        for at, counts in enumerate(self.shards):
            for count in counts:
                if count != sketch.shards[at]:
                    yield replace(sketch, shards=(*sketch.shards[:at], count, *sketch.shards[at + 1 :]))


def _singles(sketch: Sketch) -> tuple[Item, ...]:
    """Returns the items of a sketch in which nothing streams."""
    return tuple(single(unit) for item in sketch.items for unit in item.units())


def work_size(workflow: Workflow, item: Item) -> int:
    """Returns the blocks of one chunk of an item."""
    return workflow.num_blocks // item.chunks


def _with(devices: Devices, device: int) -> Devices:
    return tuple(sorted((*devices, device)))


def _without(devices: Devices, device: int) -> Devices:
    return tuple(d for d in devices if d != device)


def _swaps(parts: tuple) -> Iterator[tuple]:
    for at in range(len(parts) - 1):
        yield (*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :])
