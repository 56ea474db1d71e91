"""A plan as a search changes it: units in their order, those that stream together as one item, devices of every stage.

    Sketch((Item(1, (("rollout's opener",),)), Item(4, (("reward",), ("logprob", "critic")))), ...)

is rollout, then reward beside logprob and critic (which take turns), in 4 chunks.  That is all that matters to a run:
turns and parts side by side that pass on everything at once differ in their devices only.  Which turns have to switch
follows from memory, see `trees`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlinf_embodied.planning.tree import Devices, Leaf, LoopNode, Node, Shares, Spatial, Temporal, leaves, loop_node
from rlinf_embodied.workflow.graph import Workflow

MOST_NESTED = 5  # up to so many items, every nesting of turns that switch is tried


@dataclass(frozen=True, slots=True)
class Item:
    """Parts side by side in so many chunks, each of some stages that take turns; or one unit, in one chunk."""

    chunks: int
    parts: tuple[tuple[str, ...], ...]

    def units(self) -> tuple[str, ...]:
        """Returns its units in their order; a loop, and those it shares a stage with, has the name of its opener."""
        return tuple(unit for part in self.parts for unit in part)


@dataclass(frozen=True, slots=True)
class Sketch:
    """Items in their order; devices and their shares by stage, in the workflow's order; shards by loop, likewise."""

    items: tuple[Item, ...]
    devices: tuple[Devices, ...]
    shards: tuple[int, ...]
    shares: tuple[Shares, ...]
    _hash: int = field(init=False, repr=False, compare=False, default=0)  # a search asks for it often

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.items, self.devices, self.shards, self.shares)))

    def __hash__(self) -> int:
        return self._hash

    def units(self) -> tuple[str, ...]:
        """Returns all units in their order."""
        return tuple(unit for item in self.items for unit in item.units())

    def placed(self, changes: dict[int, Devices]) -> Sketch:
        """Returns the sketch with other devices, which share evenly, for some stages (by their number)."""
        devices = tuple(changes.get(i, own) for i, own in enumerate(self.devices))
        return replace(
            self, devices=devices, shares=tuple(() if i in changes else s for i, s in enumerate(self.shares))
        )


def single(unit: str) -> Item:
    """Returns the item of one unit."""
    return Item(1, ((unit,),))


def sketch_of(tree: Node, workflow: Workflow) -> Sketch:
    """Returns the sketch of a plan tree; which of its turns switch is left out."""
    devices = {leaf.stage: tuple(sorted(leaf.devices)) for leaf in leaves(tree)}
    shares = {
        leaf.stage: tuple(s for _, s in sorted(zip(leaf.devices, leaf.shares, strict=False))) for leaf in leaves(tree)
    }
    shards = {node.loop: node.shards for node in _loops(tree)}
    return Sketch(
        tuple(_items(tree, workflow)),
        tuple(devices[stage] for stage in workflow.stages),
        tuple(shards[loop] for loop in workflow.loops),
        tuple(shares[stage] for stage in workflow.stages),
    )


def _loops(node: Node) -> Iterator[LoopNode]:
    if isinstance(node, LoopNode):
        yield node
    elif not isinstance(node, Leaf):
        for part in node.parts:
            yield from _loops(part)


def _items(node: Node, workflow: Workflow) -> Iterator[Item]:
    if isinstance(node, Leaf):
        yield single(node.stage)
    elif isinstance(node, LoopNode):
        yield single(workflow.loops[node.loop].opener)
    elif isinstance(node, Spatial) and node.granularity not in (0, workflow.num_blocks):
        yield Item(workflow.num_blocks // node.granularity, tuple(_parts(node)))
    else:
        for part in node.parts:
            yield from _items(part, workflow)


def _parts(node: Node) -> Iterator[tuple[str, ...]]:
    if isinstance(node, Spatial):
        for part in node.parts:
            yield from _parts(part)
    else:
        yield tuple(leaf.stage for leaf in leaves(node))


# ------------------------------------------------------------------------------------------------------------ to trees
def trees(sketch: Sketch, workflow: Workflow) -> Iterator[Node]:
    """Yields the plan trees of a sketch: the one in which everything stays, then those with turns that switch."""
    yield joined(beside([item_node(item, sketch, workflow) for item in sketch.items]), True)
    if len(sketch.units()) < 2:
        return
    for switch_inside in (False, True) if any(len(p) > 1 for i in sketch.items for p in i.parts) else (False,):
        nodes = [item_node(item, sketch, workflow, not switch_inside) for item in sketch.items]
        yield from nestings(nodes) if len(nodes) <= MOST_NESTED else rows(nodes)


def item_node(item: Item, sketch: Sketch, workflow: Workflow, resident: bool = True) -> Node:
    """Returns the node of an item."""
    placed = dict(zip(workflow.stages, zip(sketch.devices, sketch.shares, strict=True), strict=True))
    if item.chunks > 1:
        parts = [joined([Leaf(stage, *placed[stage]) for stage in part], resident) for part in item.parts]
        return Spatial(tuple(parts), workflow.num_blocks // item.chunks)
    ((unit,),) = item.parts
    shards = dict(zip(workflow.loops, sketch.shards, strict=True))
    for loop in workflow.loops.values():
        if loop.opener == unit:
            places = {side: Leaf(side, *placed[side]) for side in loop.sides}
            return loop_node((loop,), places, [shards[loop.name]])
    return Leaf(unit, *placed[unit])


def joined(nodes: Sequence[Node], resident: bool) -> Node:
    """Returns nodes as turns; a single one as it is."""
    return nodes[0] if len(nodes) == 1 else Temporal(tuple(nodes), resident)


def beside(nodes: Sequence[Node]) -> list[Node]:
    """Returns nodes with neighbours on disjoint devices side by side; they pass on everything at once, as in turns."""
    rows: list[tuple[list[Node], set[int]]] = []
    for node in nodes:
        own = {device for leaf in leaves(node) for device in leaf.devices}
        if rows and not own & rows[-1][1]:
            rows[-1] = [*rows[-1][0], node], rows[-1][1] | own
        else:
            rows.append(([node], own))
    return [row[0] if len(row) == 1 else Spatial(tuple(row)) for row, _ in rows]


def nestings(nodes: Sequence[Node]) -> list[Node]:
    """Returns every nesting of turns over nodes in their order, resident or switching, neighbours alike in one node."""
    if len(nodes) == 1:
        return [nodes[0]]
    found = []
    for at in range(1, len(nodes)):
        for first, second in itertools.product(nestings(nodes[:at]), nestings(nodes[at:])):
            for resident in (True, False):
                if not (isinstance(first, Temporal) and at > 1 and first.resident == resident):
                    opened = isinstance(second, Temporal) and second.resident == resident and at < len(nodes) - 1
                    rest = second.parts if opened and isinstance(second, Temporal) else (second,)
                    found.append(Temporal((first, *rest), resident))
    return found


def rows(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yields turns that switch between rows of neighbours, which stay together."""
    for cuts in itertools.product((False, True), repeat=len(nodes) - 1):
        if any(cuts):
            ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(nodes)]
            yield Temporal(tuple(joined(nodes[a:b], True) for a, b in itertools.pairwise(ends)), False)
