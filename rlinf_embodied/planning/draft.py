"""A plan in the making: a tree that says how many devices of each class every part gets, but not yet which.

A draft can be priced, resized and compared quickly however large the cluster is; `realize` makes it a plan tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlinf_embodied.planning import cost
from rlinf_embodied.planning.cost import Price
from rlinf_embodied.planning.part_prices import Counts
from rlinf_embodied.planning.plan import Devices, Leaf, Node, Spatial, Temporal
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.tree import loop_node
from rlinf_embodied.workflow.graph import WHOLE

Allocation = tuple[int, ...]  # devices of each class


@dataclass(frozen=True, slots=True)
class Draft:
    """A node: `kind` is leaf, loop, temporal or spatial."""

    kind: str
    allocation: Allocation  # of the node; a leaf uses those of its `classes`
    name: str = ""  # of the stage or loop; of loops that share a stage, of the first
    parts: tuple[Draft, ...] = ()
    classes: tuple[int, ...] = ()  # of a leaf: the classes that it uses
    shards: int = 1
    split: tuple[Allocation, ...] = ()  # of a loop: the opener's allocation and that of its other sides; (): all on all
    chunks: int = 1  # of a spatial node, 1: inherits or all at once
    resident: bool = True  # of a temporal node

    def walk(self) -> Iterator[Draft]:
        """Yields the node and all nodes below it."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def shape(self) -> str:
        """Returns the structure without numbers of devices, for example "rollout collocated > actor"."""
        if self.kind == "leaf":
            return self.name
        if self.kind == "loop":
            return f"{self.name}{' disaggregated' if self.split else ' collocated'}"
        sign = {"spatial": " || ", "temporal": " > " if self.resident else " >> "}[self.kind]
        return "(" + sign.join(part.shape() for part in self.parts) + ")"


def counts(allocation: Allocation) -> Counts:
    """Returns an allocation as the pricer wants it, [1, classes]."""
    return np.array([allocation], dtype=np.int64)


def price(draft: Draft, pricer: Pricer, chunks: int = 1) -> tuple[Price, int]:
    """Returns the price of a draft, in arrays of length 1, and its stages as a bit mask."""
    if draft.kind == "leaf":
        used = tuple(n if i in draft.classes else 0 for i, n in enumerate(draft.allocation))
        leaf = pricer.leaf(draft.name, counts(used), chunks)
        if used != draft.allocation:
            leaf = replace(leaf, everywhere=np.zeros_like(leaf.everywhere))
        return leaf, pricer.bits[draft.name]
    if draft.kind == "loop":
        loops = (pricer.workflow.loops[draft.name],)
        mask = pricer.mask_of(loops)
        if draft.split:
            return pricer.loop_disaggregated(loops, counts(draft.split[0]), counts(draft.split[1]), draft.shards), mask
        return pricer.loop_collocated(loops, counts(draft.allocation), draft.shards), mask
    inner = draft.chunks if chunks == 1 else chunks
    whole, mask = price(draft.parts[0], pricer, inner)
    allocation = draft.parts[0].allocation
    for part in draft.parts[1:]:
        second, second_mask = price(part, pricer, inner)
        cut = pricer.cut(mask, second_mask)
        if draft.kind == "spatial":
            whole = pricer.spatial(cut, whole, second, inner, counts(allocation), counts(part.allocation))
            allocation = tuple(a + b for a, b in zip(allocation, part.allocation, strict=True))
        else:
            by_chunk = pricer.by_chunk(mask, second_mask, inner)
            whole = pricer.temporal(cut, whole, second, inner, counts(draft.allocation), by_chunk, draft.resident)
        mask |= second_mask
    return (cost.collapse(whole, inner) if chunks == 1 else whole), mask


def resize(draft: Draft, allocation: Allocation) -> Draft:
    """Returns the draft on another allocation; what is gained or lost goes to its largest part."""
    if draft.kind == "temporal":
        return replace(draft, allocation=allocation, parts=tuple(resize(part, allocation) for part in draft.parts))
    change = tuple(new - old for new, old in zip(allocation, draft.allocation, strict=True))
    if draft.kind == "spatial":
        largest = max(range(len(draft.parts)), key=lambda i: sum(draft.parts[i].allocation))
        parts = list(draft.parts)
        parts[largest] = resize(parts[largest], _add(parts[largest].allocation, change))
        return replace(draft, allocation=allocation, parts=tuple(parts))
    if draft.split:
        largest = max((0, 1), key=lambda i: sum(draft.split[i]))
        split = list(draft.split)
        split[largest] = _add(split[largest], change)
        return replace(draft, allocation=allocation, split=tuple(split))
    return replace(draft, allocation=allocation)


def _add(allocation: Allocation, change: Allocation) -> Allocation:
    return tuple(a + b for a, b in zip(allocation, change, strict=True))


def moves(draft: Draft, step: int, class_: int) -> Iterator[Draft]:
    """Yields the drafts that differ by `step` devices of a class moved between neighbouring parts, somewhere in it."""
    change = tuple(step if i == class_ else 0 for i in range(len(draft.allocation)))
    back = tuple(-n for n in change)
    if draft.split:
        yield from (
            replace(draft, split=(_add(draft.split[0], a), _add(draft.split[1], b))) for a, b in _both(change, back)
        )
    for i, part in enumerate(draft.parts):
        for other in moves(part, step, class_):
            yield replace(draft, parts=(*draft.parts[:i], other, *draft.parts[i + 1 :]))
    if draft.kind == "spatial":
        for i in range(len(draft.parts) - 1):
            for a, b in _both(change, back):
                pair = (resize(draft.parts[i], _add(draft.parts[i].allocation, a)), draft.parts[i + 1])
                pair = (pair[0], resize(pair[1], _add(pair[1].allocation, b)))
                yield replace(draft, parts=(*draft.parts[:i], *pair, *draft.parts[i + 2 :]))


def _both(change: Allocation, back: Allocation) -> tuple[tuple[Allocation, Allocation], tuple[Allocation, Allocation]]:
    return (change, back), (back, change)


def is_possible(draft: Draft) -> bool:
    """Returns whether every part has at least one device and none has a negative number of a class."""
    allocations = [allocation for node in draft.walk() for allocation in (node.allocation, *node.split)]
    return all(min(allocation) >= 0 and sum(allocation) > 0 for allocation in allocations)


def realize(draft: Draft, pools: tuple[Devices, ...], pricer: Pricer, chunks: int = 1) -> Node:
    """Returns the plan tree on actual devices.

    Args:
        draft: the node.
        pools: the devices of each class that the node owns, ascending.
        pricer: knows the workflow; a stage never uses more devices than there are blocks.
        chunks: of the spatial node around it.
    """
    num_blocks = pricer.workflow.num_blocks
    if draft.kind == "leaf":
        most = pricer.workflow.most_devices(draft.name, num_blocks // chunks)
        return Leaf(draft.name, _first([pools[i] for i in draft.classes], most))
    if draft.kind == "loop":
        loops = (pricer.workflow.loops[draft.name],)
        sides = _divide(pools, draft.split) if draft.split else [pools, pools]
        halves = zip(pricer.halves(loops), sides, strict=True)
        places = {stage: Leaf(stage, _first(side, num_blocks)) for half, side in halves for stage in half}
        return loop_node(loops, places, (draft.shards,) * len(loops))
    if draft.kind == "temporal":
        return Temporal(tuple(realize(part, pools, pricer, chunks) for part in draft.parts), draft.resident)
    inner = draft.chunks if chunks == 1 else chunks
    owned = _divide(pools, [part.allocation for part in draft.parts])
    parts = tuple(realize(part, own, pricer, inner) for part, own in zip(draft.parts, owned, strict=True))
    return Spatial(parts, num_blocks // inner if inner > 1 else WHOLE)


def _divide(pools: tuple[Devices, ...], allocations: Sequence[Allocation]) -> list[tuple[Devices, ...]]:
    """Returns the pools cut in consecutive pieces of the given sizes."""
    pieces, left = [], pools
    for allocation in allocations:
        pieces.append(tuple(pool[:n] for pool, n in zip(left, allocation, strict=True)))
        left = tuple(pool[n:] for pool, n in zip(left, allocation, strict=True))
    return pieces


def _first(pools: Sequence[Devices], num_blocks: int) -> Devices:
    return tuple(sorted(device for pool in pools for device in pool))[:num_blocks]
