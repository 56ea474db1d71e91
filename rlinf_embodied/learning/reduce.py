"""Sums over the blocks of all workers, along one fixed binary tree (exact) or by all-reduce (fast).

    block   0   1   2   3   4        owners 0 0 0 1 1: worker 0 sums (0 1) and hands over (0 1) and 2,
             \\ /     \\ /    |                          worker 1 hands over 3 and 4; then both finish the
            (0 1)   (2 3)   |                          same tree: ((0 1) + (2 3)) + 4
                \\   /       |
               (0..3) ------+

Floating-point addition is not associative: a sum has the same bits under every plan only if its brackets are the same.

A sum takes blocks as they come and adds up what belongs together at once: a worker with n neighbouring blocks holds
about log2(n) tensors at a time, not n.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlinf_embodied.config import Reduction
from rlinf_embodied.learning.groups import Group

_Node = tuple[int, int]  # the blocks [lo, hi)


# ------------------------------------------------------------------------------------------------------------- reducers
class BlockSum(Protocol):
    """A sum over the blocks of all workers, of which each worker adds those that it owns, in any order."""

    def add(self, block: int, tensor: Tensor) -> None:
        """Takes a block's tensor over, which may be written into; all of a sum share shape and dtype."""
        ...

    def total(self) -> Tensor:
        """Returns the sum once every own block was added; all workers of the group call it, and it ends the sum.

        The tensor is the caller's own.
        """
        ...


class Reducer(Protocol):
    """Sums and gathers over all blocks; each worker passes the blocks that it owns and gets what all get."""

    @property
    def rank(self) -> int:
        """The worker's number in its group."""
        ...

    def start_sum(self) -> BlockSum:
        """Returns a new sum, to which nothing is added yet."""
        ...

    def sum_blocks(self, per_block: Mapping[int, Tensor]) -> Tensor:
        """Returns the sum over all blocks of all workers; the (small) tensors are left as they are."""
        ...

    def gather_blocks(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the (small) tensors of all blocks of all workers, in the order of the blocks."""
        ...


def make_reducer(reduction: Reduction, group: Group, owners: Sequence[int], device: str) -> Reducer:
    """Returns the reducer of a choice; `auto` is exact on a CPU, and fast elsewhere, where kernels are not exact."""
    exact = reduction is Reduction.exact or (reduction is Reduction.auto and torch.device(device).type == "cpu")
    return (ExactReducer if exact else FastReducer)(group, owners)


class _BlockReducer(ABC):
    """What the reducers share."""

    def __init__(self, group: Group, owners: Sequence[int]) -> None:
        """Takes the rank that owns each block; every rank of the group owns at least one."""
        self._blocks = _Ownership(group, owners)

    @property
    def rank(self) -> int:
        return self._blocks.group.rank

    @abstractmethod
    def start_sum(self) -> BlockSum:
        """See Reducer."""

    def sum_blocks(self, per_block: Mapping[int, Tensor]) -> Tensor:
        self._blocks.require_own(per_block)
        total = self.start_sum()
        for block in sorted(per_block):
            total.add(block, per_block[block].clone())
        return total.total()

    def gather_blocks(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return self._blocks.gather(per_block)


class ExactReducer(_BlockReducer):
    """Sums along one binary tree over block ids: the same bits for every number of workers and every ownership.

    The node of blocks [lo, hi) splits after the largest power of two below its size.  A worker sums the maximal
    subtrees that it owns whole; only these roots travel, and everybody finishes the tree in the same way.
    """

    def __init__(self, group: Group, owners: Sequence[int]) -> None:
        super().__init__(group, owners)
        self._roots: list[list[_Node]] = [[] for _ in range(group.size)]
        for lo, hi in _maximal_subtrees(owners, 0, len(owners)):
            self._roots[owners[lo]].append((lo, hi))
        self._above = {child: place for root in self._roots[group.rank] for child, place in _kinship(*root)}

    def start_sum(self) -> BlockSum:
        return _TreeSum(self._blocks, self._roots, self._above)


class FastReducer(_BlockReducer):
    """Sums its own blocks, then all-reduces: one tensor per worker travels, and the bits depend on the plan."""

    def start_sum(self) -> BlockSum:
        return _RunningSum(self._blocks)


class _Ownership:
    """Which rank owns which blocks."""

    def __init__(self, group: Group, owners: Sequence[int]) -> None:
        assert set(owners) == set(range(group.size)), (
            f"owners {list(owners)} must name each of the {group.size} ranks at least once"
        )
        self.group = group
        self.num_blocks = len(owners)
        self._by_rank = [[b for b, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]

    def require_own(self, blocks: Collection[int]) -> None:
        own = self._by_rank[self.group.rank]
        assert sorted(blocks) == own, f"rank {self.group.rank} owns blocks {own} but passes {sorted(blocks)}"

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


# ----------------------------------------------------------------------------------------------------------------- sums
class _TreeSum:
    """The tree as far as this worker's blocks are there: a node is summed as soon as both of its halves are."""

    def __init__(
        self, blocks: _Ownership, roots: Sequence[Sequence[_Node]], above: Mapping[_Node, tuple[_Node, _Node]]
    ) -> None:
        """Takes the roots of each rank, and (sibling, parent) of every node below this rank's own ones."""
        self._blocks, self._roots, self._above = blocks, roots, above
        self._added: set[int] = set()
        self._known: dict[_Node, Tensor] = {}

    def add(self, block: int, tensor: Tensor) -> None:
        """See BlockSum; which half comes first shows in no bit, as a + b is b + a."""
        assert block not in self._added, f"block {block} was added already"
        self._added.add(block)
        node = (block, block + 1)
        while node in self._above and self._above[node][0] in self._known:
            sibling, node = self._above[node]
            tensor = tensor.add_(self._known.pop(sibling))
        self._known[node] = tensor

    def total(self) -> Tensor:
        self._blocks.require_own(self._added)
        group = self._blocks.group
        mine = [self._known.pop(root) for root in self._roots[group.rank]]
        answers = group.exchange(mine, [len(roots) for roots in self._roots])
        known = {
            node: tensor
            for roots, tensors in zip(self._roots, answers, strict=True)
            for node, tensor in zip(roots, tensors, strict=True)
        }
        return _tree_sum(known, 0, self._blocks.num_blocks)


class _RunningSum:
    """One tensor, to which blocks are added in the order in which they come."""

    def __init__(self, blocks: _Ownership) -> None:
        self._blocks = blocks
        self._added: set[int] = set()
        self._sum: Tensor | None = None

    def add(self, block: int, tensor: Tensor) -> None:
        self._added.add(block)
        self._sum = tensor if self._sum is None else self._sum.add_(tensor)

    def total(self) -> Tensor:
        self._blocks.require_own(self._added)
        assert self._sum is not None, "every rank owns a block"
        return self._blocks.group.all_reduce(self._sum)


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


def _kinship(lo: int, hi: int) -> Iterator[tuple[_Node, tuple[_Node, _Node]]]:
    """Yields (node, (its sibling, their parent)) of every node below [lo, hi)."""
    if hi - lo == 1:
        return
    left, right = (lo, _middle(lo, hi)), (_middle(lo, hi), hi)
    yield left, (right, (lo, hi))
    yield right, (left, (lo, hi))
    yield from _kinship(*left)
    yield from _kinship(*right)
