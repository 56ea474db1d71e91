"""Sums over the blocks of all workers, along one fixed binary tree (exact) or by all-reduce (fast).

    block   0   1   2   3   4        owners 0 0 0 1 1: worker 0 sums (0 1) and hands over (0 1) and 2,
             \\ /     \\ /    |                          worker 1 hands over 3 and 4; then both finish the
            (0 1)   (2 3)   |                          same tree: ((0 1) + (2 3)) + 4
                \\   /       |
               (0..3) ------+

Floating-point addition is not associative: a sum has the same bits under every plan only if its brackets are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlinf_embodied.learning.groups import Group


# ------------------------------------------------------------------------------------------------------------- reducers
class Reducer(Protocol):
    """Sums and gathers over all blocks; each worker passes the blocks that it owns and gets what all get."""

    def sum_blocks(self, per_block: Mapping[int, Tensor]) -> Tensor:
        """Returns the sum over all blocks of all workers; the tensors share shape and dtype."""
        ...

    def gather_blocks(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the (small) tensors of all blocks of all workers, in the order of the blocks."""
        ...


class ExactReducer:
    """Sums along one binary tree over block ids: the same bits for every number of workers and every ownership.

    The node of blocks [lo, hi) splits after the largest power of two below its size.  A worker sums the maximal
    subtrees that it owns whole; only these roots travel, and everybody finishes the tree in the same way.
    """

    def __init__(self, group: Group, owners: Sequence[int]) -> None:
        """Takes the rank that owns each block; every rank of the group owns at least one."""
        self._blocks = _Ownership(group, owners)
        self._roots: list[list[tuple[int, int]]] = [[] for _ in range(group.size)]
        for lo, hi in _maximal_subtrees(owners, 0, len(owners)):
            self._roots[owners[lo]].append((lo, hi))

    def sum_blocks(self, per_block: Mapping[int, Tensor]) -> Tensor:
        """See Reducer."""
        group = self._blocks.group
        self._blocks.require_own(per_block)
        leaves = {(block, block + 1): tensor for block, tensor in per_block.items()}
        mine = [_tree_sum(leaves, lo, hi) for lo, hi in self._roots[group.rank]]
        answers = group.exchange(mine, [len(roots) for roots in self._roots])
        known = {
            node: tensor
            for roots, tensors in zip(self._roots, answers, strict=True)
            for node, tensor in zip(roots, tensors, strict=True)
        }
        total = _tree_sum(known, 0, self._blocks.num_blocks)
        return total.clone() if self._blocks.num_blocks == 1 else total  # never the caller's own tensor

    def gather_blocks(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """See Reducer."""
        return self._blocks.gather(per_block)


class FastReducer:
    """Sums its own blocks, then all-reduces: one tensor per worker travels, and the bits depend on the plan."""

    def __init__(self, group: Group, owners: Sequence[int]) -> None:
        """Takes the rank that owns each block; every rank of the group owns at least one."""
        self._blocks = _Ownership(group, owners)

    def sum_blocks(self, per_block: Mapping[int, Tensor]) -> Tensor:
        """See Reducer."""
        self._blocks.require_own(per_block)
        first, *rest = (per_block[block] for block in sorted(per_block))
        total = first.clone()
        for tensor in rest:
            total += tensor
        return self._blocks.group.all_reduce(total)

    def gather_blocks(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """See Reducer."""
        return self._blocks.gather(per_block)


class _Ownership:
    """Which rank owns which blocks."""

    def __init__(self, group: Group, owners: Sequence[int]) -> None:
        assert set(owners) == set(range(group.size)), (
            f"owners {list(owners)} must name each of the {group.size} ranks at least once"
        )
        self.group = group
        self.num_blocks = len(owners)
        self._by_rank = [[b for b, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]

    def require_own(self, per_block: Mapping[int, Tensor]) -> None:
        own = self._by_rank[self.group.rank]
        assert sorted(per_block) == own, f"rank {self.group.rank} owns blocks {own} but passes {sorted(per_block)}"

    def gather(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self.require_own(per_block)
        mine = [per_block[block] for block in self._by_rank[self.group.rank]]
        answers = self.group.exchange(mine, [len(blocks) for blocks in self._by_rank])
        found = {
            block: tensor
            for blocks, tensors in zip(self._by_rank, answers, strict=True)
            for block, tensor in zip(blocks, tensors, strict=True)
        }
        return {block: found[block] for block in range(self.num_blocks)}


# ----------------------------------------------------------------------------------------------------------------- tree
def _middle(lo: int, hi: int) -> int:
    """Returns where the node [lo, hi) splits: after the largest power of two below its size."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def _maximal_subtrees(owners: Sequence[int], lo: int, hi: int) -> list[tuple[int, int]]:
    """Returns the largest nodes within [lo, hi) whose blocks have one owner, from left to right."""
    if len(set(owners[lo:hi])) == 1:
        return [(lo, hi)]
    middle = _middle(lo, hi)
    return _maximal_subtrees(owners, lo, middle) + _maximal_subtrees(owners, middle, hi)


def _tree_sum(known: Mapping[tuple[int, int], Tensor], lo: int, hi: int) -> Tensor:
    """Returns the sum of the node [lo, hi) from sums of nodes that are known already."""
    if (lo, hi) in known:
        return known[lo, hi]
    middle = _middle(lo, hi)
    return _tree_sum(known, lo, middle) + _tree_sum(known, middle, hi)
