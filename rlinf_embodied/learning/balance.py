"""Load balancing of a learner's workers: moves blocks between owners for one update, without changing any sum.

Sums follow one tree over block ids, whoever owns them (reduce.py), so a worker with long completions can pass whole
blocks to others.  They return to their owners in the next iteration.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_embodied.learning.groups import Group

_CLOSE_ENOUGH = 1.05  # imbalance up to which no block is moved


def balanced_owners(loads: Sequence[float], owners: Sequence[int]) -> list[int]:
    """Returns a rank for each block: largest first to the least loaded rank (Graham 1969), then improved by exchanges.

    Returns `owners` if they are balanced well enough, or at least as well.
    """
    assigned, size = [0] * len(owners), max(owners) + 1
    loads_by_rank = [(0.0, 0, rank) for rank in range(size)]  # load, blocks, rank
    for block in sorted(range(len(loads)), key=lambda block: (-loads[block], block)):
        load, number, rank = min(loads_by_rank)
        assigned[block], loads_by_rank[rank] = rank, (load + loads[block], number + 1, rank)
    while (pair := _exchange(loads, assigned)) is not None:
        first, second = pair
        assigned[first], assigned[second] = assigned[second], assigned[first]
    current, achieved = imbalance(loads, owners), imbalance(loads, assigned)
    return list(owners) if current <= max(_CLOSE_ENOUGH, achieved) else assigned


def _exchange(loads: Sequence[float], owners: Sequence[int]) -> tuple[int, int] | None:
    """Returns the best exchange of a block of the busiest rank with one of another rank; None if none helps."""
    sums = [sum(load for load, owner in zip(loads, owners, strict=True) if owner == r) for r in range(max(owners) + 1)]
    busiest = sums.index(max(sums))
    after = lambda a, b: max(sums[busiest] - loads[a] + loads[b], sums[owners[b]] - loads[b] + loads[a])  # noqa: E731
    own_blocks = [block for block, owner in enumerate(owners) if owner == busiest]
    pairs = [(after(a, b), a, b) for a in own_blocks for b, owner in enumerate(owners) if owner != busiest]
    best, *pair = min(pairs, default=(sums[busiest], 0, 0))
    return (pair[0], pair[1]) if best < sums[busiest] * (1 - 1e-6) else None


def imbalance(loads: Sequence[float], owners: Sequence[int]) -> float:
    """Returns the load of the busiest rank divided by the mean."""
    loads_by_rank = [0.0] * (max(owners) + 1)
    for owner, load in zip(owners, loads, strict=True):
        loads_by_rank[owner] += load
    return max(loads_by_rank) * len(loads_by_rank) / max(sum(loads_by_rank), 1e-9)


def moved(group: Group, before: Sequence[int], after: Sequence[int], own: Mapping[int, Any]) -> dict[int, Any]:
    """Moves blocks from their owners `before` to those `after`; returns this rank's blocks.

    `own` are this rank's blocks before, made of tensors and numbers in dictionaries, lists and tuples.

    All ranks receive all moved blocks, since groups have no point-to-point messages; they are small compared with a
    gradient.
    """
    moving = [[b for b, (a, z) in enumerate(zip(before, after, strict=True)) if a == r != z] for r in range(group.size)]
    packed = [_packed(own[b]) for b in moving[group.rank]]
    longest = torch.tensor([max(map(len, packed), default=1)])
    width = max(int(part[0]) for part in group.exchange([longest], [1] * group.size))
    sent = [torch.cat([part, part.new_zeros(width - len(part))]) for part in packed]
    empty = torch.zeros(width, dtype=torch.uint8)
    received = group.exchange(sent or [empty], [max(1, len(blocks)) for blocks in moving])
    result = {block: rows for block, rows in own.items() if after[block] == group.rank}
    for blocks, parts in zip(moving, received, strict=True):
        result |= {
            block: torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True)
            for block, part in zip(blocks, parts, strict=False)
            if after[block] == group.rank
        }
    return dict(sorted(result.items()))


def _packed(block: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(block, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
