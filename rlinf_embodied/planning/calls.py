"""Which calls a stage's blocks come in, by device and chunk (or shard), and which calls of one stage feed another's."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_embodied.planning.tree import Devices, Leaf


@dataclass(frozen=True, slots=True)
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

    @classmethod
    def of_chunks(cls, leaf: Leaf, num_blocks: int, chunks: int, blocks_per_batch: int) -> Layout:
        """Returns the calls for chunks of neighbouring blocks, each spread over all devices."""
        size = num_blocks // chunks
        parts = [range(k * size, (k + 1) * size) for k in range(chunks)]
        return _layout(parts, owners(leaf, num_blocks, size, blocks_per_batch))

    @classmethod
    def of_shards(cls, leaf: Leaf, num_blocks: int, shards: int, blocks_per_batch: int) -> Layout:
        """Returns the calls for the shards of a loop, whose blocks are dealt round robin."""
        parts = [range(k, num_blocks, shards) for k in range(shards)]
        return _layout(parts, owners(leaf, num_blocks, num_blocks, blocks_per_batch))


def owners(leaf: Leaf, num_blocks: int, chunk: int, blocks_per_batch: int = 1) -> Devices:
    """Returns the device that owns each block: contiguous within a chunk, by the leaf's shares or else evenly.

    The blocks of a batch have one owner, whatever the chunks.  Shares divide by the number of chunks, and so does each
    chunk (see plan_check.py): (4, 2) of six blocks in two chunks is 0 0 1 0 0 1.
    """
    devices = leaf.devices
    if leaf.shares:
        chunk = num_blocks if blocks_per_batch > 1 else chunk
        sizes = [share * chunk // num_blocks for share in leaf.shares]
        of_chunk = [device for device, size in zip(devices, sizes, strict=True) for _ in range(size)]
        return tuple(of_chunk) * (num_blocks // chunk)
    if blocks_per_batch > 1:
        sets = num_blocks // blocks_per_batch
        return tuple(devices[block // blocks_per_batch * len(devices) // sets] for block in range(num_blocks))
    return tuple(devices[block % chunk * len(devices) // chunk] for block in range(num_blocks))


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
