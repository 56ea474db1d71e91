"""Which calls a stage's blocks come in, by device and chunk (or shard), and which calls of one stage feed another's."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.plan import Item, Place, owners
from rlinf_embodied.workflow.graph import Workflow


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The calls of a stage: devices and sizes [calls]; who makes a block, and as which of its call's [blocks].

    Two devices, four blocks, two chunks: devices (0, 1, 0, 1), sizes (1, 1, 1, 1), groups (0..1, 2..3).
    """

    devices: tuple[int, ...]
    sizes: tuple[int, ...]
    groups: tuple[range, ...]  # the calls of each chunk or shard
    call_of: tuple[int, ...]
    place_of: tuple[int, ...]
    hosts: tuple[int, ...]  # devices with any block, ascending


class Layouts:
    """The layouts of one workflow's stages; what many plans have in common is made once."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow
        self._known: dict[tuple[Place, int], Layout] = {}
        self._fused: dict[tuple[Place, ...], bool] = {}

    def of(self, place: Place, parts: int, shards: bool = False) -> Layout:
        """Returns the calls of a stage: for each of `parts` chunks, or shards of a loop."""
        key = (place, -parts if shards else parts)
        if key not in self._known:
            blocks, batch = self._workflow.num_blocks, self._workflow.stages[place.stage].blocks_per_batch
            size = blocks if shards else blocks // parts
            cut = [range(k, blocks, parts) if shards else range(k * size, (k + 1) * size) for k in range(parts)]
            self._known[key] = _layout(cut, owners(place, blocks, size, batch))
        return self._known[key]

    def fused(self, item: Item, cluster: Cluster) -> bool:
        """Returns whether a loop is one call per worker: both sides have the same blocks on the same devices."""
        if item.places not in self._fused:
            same = {owners(place, self._workflow.num_blocks) for place in item.places}
            self._fused[item.places] = len(same) == 1
        return self._fused[item.places] and not cluster.always_store


def _layout(parts: list[range], owner: tuple[int, ...]) -> Layout:
    devices: list[int] = []
    sizes: list[int] = []
    groups: list[range] = []
    call_of, place_of = [0] * len(owner), [0] * len(owner)
    for part in parts:
        first, last = len(devices), None
        for block in part:
            if owner[block] != last:
                last = owner[block]
                devices.append(last)
                sizes.append(0)
            call_of[block], place_of[block] = len(devices) - 1, sizes[-1]
            sizes[-1] += 1
        groups.append(range(first, len(devices)))
    return Layout(
        tuple(devices), tuple(sizes), tuple(groups), tuple(call_of), tuple(place_of), tuple(sorted(set(owner)))
    )


@dataclass(frozen=True, slots=True)
class Link:
    """Blocks that one call gets from another one: so many, the first of them the place-th that the other made."""

    call: int
    blocks: int
    place: int


def links(source: Layout, target: Layout) -> list[tuple[Link, ...]]:
    """Returns for each call of a target what it gets from the calls of a source, over the same blocks."""
    found: list[dict[int, tuple[int, int]]] = [{} for _ in target.devices]
    for block, call in enumerate(target.call_of):
        maker, place = source.call_of[block], source.place_of[block]
        blocks, first = found[call].get(maker, (0, place))
        found[call][maker] = blocks + 1, min(first, place)
    return [tuple(Link(maker, n, first) for maker, (n, first) in parts.items()) for parts in found]
