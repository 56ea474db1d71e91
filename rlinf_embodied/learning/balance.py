"""Equal work for the workers of a learner: blocks change their owner for an update, and no sum its order.

Sums go along one tree over block numbers whoever owns them (reduce.py), so a worker that has long completions hands
whole blocks to others.  They return to their owners with the next iteration.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_embodied.learning.groups import Group

_CLOSE_ENOUGH = 1.05  # the busiest worker's load over the mean: below it nothing is moved


def balanced_owners(loads: Sequence[float], owners: Sequence[int]) -> list[int]:
    """Returns a rank for each block: the largest first, to the rank with the least (Graham 1969), then by exchanges.

    Blocks stay with their `owners` where these are balanced well enough, or as well as any.
    """
    dealt, size = [0] * len(owners), max(owners) + 1
    held = [(0.0, 0, rank) for rank in range(size)]  # load, blocks, rank
    for block in sorted(range(len(loads)), key=lambda block: (-loads[block], block)):
        load, number, rank = min(held)
        dealt[block], held[rank] = rank, (load + loads[block], number + 1, rank)
    while (pair := _exchange(loads, dealt)) is not None:
        first, second = pair
        dealt[first], dealt[second] = dealt[second], dealt[first]
    now, then = imbalance(loads, owners), imbalance(loads, dealt)
    return list(owners) if now <= max(_CLOSE_ENOUGH, then) else dealt


def _exchange(loads: Sequence[float], owners: Sequence[int]) -> tuple[int, int] | None:
    """Returns a block of the busiest rank and one of another whose exchange helps most; None: no exchange does."""
    held = [sum(load for load, owner in zip(loads, owners, strict=True) if owner == r) for r in range(max(owners) + 1)]
    busiest = held.index(max(held))
    after = lambda a, b: max(held[busiest] - loads[a] + loads[b], held[owners[b]] - loads[b] + loads[a])  # noqa: E731
    mine = [block for block, owner in enumerate(owners) if owner == busiest]
    pairs = [(after(a, b), a, b) for a in mine for b, owner in enumerate(owners) if owner != busiest]
    best, *pair = min(pairs, default=(held[busiest], 0, 0))
    return (pair[0], pair[1]) if best < held[busiest] * (1 - 1e-6) else None


def imbalance(loads: Sequence[float], owners: Sequence[int]) -> float:
    """Returns the load of the busiest rank over the mean of all."""
    held = [0.0] * (max(owners) + 1)
    for owner, load in zip(owners, loads, strict=True):
        held[owner] += load
    return max(held) * len(held) / max(sum(held), 1e-9)


def moved(group: Group, before: Sequence[int], after: Sequence[int], own: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the blocks that are this rank's `after`, of which each rank has those that were its own `before`.

    A block consists of tensors and numbers in dictionaries, lists and tuples.

    All ranks see what moves, which is little beside a gradient: groups know no messages between two of their members.
    """
    going = [[b for b, (a, z) in enumerate(zip(before, after, strict=True)) if a == r != z] for r in range(group.size)]
    mine = [_packed(own[b]) for b in going[group.rank]]
    longest = torch.tensor([max(map(len, mine), default=1)])
    width = max(int(part[0]) for part in group.exchange([longest], [1] * group.size))
    sent = [torch.cat([part, part.new_zeros(width - len(part))]) for part in mine]
    empty = torch.zeros(width, dtype=torch.uint8)
    received = group.exchange(sent or [empty], [max(1, len(blocks)) for blocks in going])
    found = {block: rows for block, rows in own.items() if after[block] == group.rank}
    for blocks, parts in zip(going, received, strict=True):
        found |= {
            block: torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True)
            for block, part in zip(blocks, parts, strict=False)
            if after[block] == group.rank
        }
    return dict(sorted(found.items()))


def _packed(block: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(block, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
