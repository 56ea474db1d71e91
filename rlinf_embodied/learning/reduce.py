"""Sums over the blocks of all workers, along one fixed binary tree (exact) or by all-reduce (fast).

    block   0   1   2   3   4        owners 0 0 0 1 1: worker 0 sums (0 1) and sends (0 1) and 2,
             \\ /     \\ /    |                          worker 1 sends 3 and 4; then both finish the
            (0 1)   (2 3)   |                          same tree: ((0 1) + (2 3)) + 4
                \\   /       |
               (0..3) ------+

Floating-point addition is not associative: a sum has the same bits under every plan only if its brackets are the same.
The node of blocks [lo, hi) splits after the largest power of two below its size.  A worker sums the maximal subtrees
that it owns; workers exchange only these roots, and all finish the tree in the same way.

A sum accepts blocks in any order and combines siblings at once: a worker with n adjacent blocks holds about log2(n)
tensors at a time, not n.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlinf_embodied.config import Reduction
from rlinf_embodied.learning.groups import Group

_Node = tuple[int, int]  # the blocks [lo, hi)
_OWN = (0, 0)  # of a fast sum: all blocks that were added so far


def make_reducer(reduction: Reduction, group: Group, owners: Sequence[int], device: str) -> Reducer:
    """Returns the reducer of a setting; `auto` is exact on CPUs, and fast elsewhere, where kernels are not exact."""
    on_cpu = torch.device(device).type == "cpu"
    return Reducer(group, owners, reduction is Reduction.exact or (reduction is Reduction.auto and on_cpu))


class Reducer:
    """Sums and gathers over all blocks; each worker passes its own blocks, and all get the same result.

    An exact sum has the same bits for any number of workers and any ownership.  A fast one sends one tensor per
    worker, and its bits depend on the plan.
    """

    def __init__(self, group: Group, owners: Sequence[int], exact: bool = True) -> None:
        """`owners`: the rank that owns each block; every rank of the group owns at least one."""
        assert set(owners) == set(range(group.size)), (
            f"owners {list(owners)} must name each of the {group.size} ranks at least once"
        )
        self.group, self.exact, self.num_blocks = group, exact, len(owners)
        self._by_rank = [[b for b, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]
        self.roots: list[list[_Node]] = [[] for _ in range(group.size)]  # that each rank sums
        for lo, hi in _maximal_subtrees(owners, 0, len(owners)):
            self.roots[owners[lo]].append((lo, hi))
        # (sibling, parent) of every node below this rank's roots
        self.above = {child: place for root in self.roots[group.rank] for child, place in _kinship(root)}

    def sum_blocks(self, per_block: Mapping[int, Tensor]) -> Tensor:
        """Returns the sum over all blocks of all workers; the (small) tensors do not change."""
        total = BlockSum(self)
        for block in sorted(per_block):
            total.add([block], per_block[block].clone())
        return total.total()

    def gather_blocks(self, per_block: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the (small) tensors of all blocks of all workers, in the order of the blocks."""
        self.require_own(per_block)
        own = [per_block[block] for block in self._by_rank[self.group.rank]]
        received = self.group.exchange(own, [len(blocks) for blocks in self._by_rank])
        by_block = _paired(self._by_rank, received)
        return {block: by_block[block] for block in range(self.num_blocks)}

    def require_own(self, blocks: Collection[int]) -> None:
        own = self._by_rank[self.group.rank]
        assert sorted(blocks) == own, f"rank {self.group.rank} owns blocks {own} but passes {sorted(blocks)}"


class BlockSum:
    """A sum over the blocks of all workers; each worker adds its own, in any order."""

    def __init__(self, reducer: Reducer) -> None:
        self.added: set[int] = set()  # blocks
        self._reducer = reducer
        self._known: dict[_Node, Tensor] = {}

    def add(self, blocks: Collection[int], tensor: Tensor) -> None:
        """Adds the sum of one block, or for a fast sum of several; all tensors of a sum have the same shape and dtype.

        The tensor may be overwritten.
        The order in which the halves of a node arrive does not matter, since a + b equals b + a bit for bit.
        """
        twice = self.added.intersection(blocks)
        assert not twice, f"blocks {sorted(twice)} were added already"
        self.added.update(blocks)
        if not self._reducer.exact:
            self._known[_OWN] = self._known[_OWN].add_(tensor) if self._known else tensor
            return
        (block,) = blocks
        node, above = (block, block + 1), self._reducer.above
        while node in above and above[node][0] in self._known:
            sibling, node = above[node]
            tensor = tensor.add_(self._known.pop(sibling))
        self._known[node] = tensor

    def total(self) -> Tensor:
        """Returns the sum, which the caller may modify; all workers call it after adding their blocks."""
        reducer, group = self._reducer, self._reducer.group
        reducer.require_own(self.added)
        if not reducer.exact:
            return group.all_reduce(self._known[_OWN])
        own = [self._known.pop(root) for root in reducer.roots[group.rank]]
        received = group.exchange(own, [len(roots) for roots in reducer.roots])
        return _tree_sum(_paired(reducer.roots, received), (0, reducer.num_blocks))


def _paired(keys: Sequence[Sequence], tensors: Sequence[Sequence[Tensor]]) -> dict:
    ranks = zip(keys, tensors, strict=True)
    return {key: tensor for names, parts in ranks for key, tensor in zip(names, parts, strict=True)}


def _halves(lo: int, hi: int) -> tuple[_Node, _Node]:
    """Splits the node [lo, hi) after the largest power of two below its size."""
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return (lo, middle), (middle, hi)


def _maximal_subtrees(owners: Sequence[int], lo: int, hi: int) -> list[_Node]:
    """Returns the largest nodes within [lo, hi) with a single owner, from left to right."""
    if len(set(owners[lo:hi])) == 1:
        return [(lo, hi)]
    return [node for half in _halves(lo, hi) for node in _maximal_subtrees(owners, *half)]


def _tree_sum(known: Mapping[_Node, Tensor], node: _Node) -> Tensor:
    if node in known:
        return known[node]
    left, right = _halves(*node)
    return _tree_sum(known, left) + _tree_sum(known, right)


def _kinship(node: _Node) -> Iterator[tuple[_Node, tuple[_Node, _Node]]]:
    """Yields (node, (its sibling, their parent)) of every node below a node."""
    if node[1] - node[0] > 1:
        left, right = _halves(*node)
        yield from ((left, (right, node)), (right, (left, node)))
        yield from (*_kinship(left), *_kinship(right))
