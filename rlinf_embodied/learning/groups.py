"""Groups: the workers that take part in a collective; a process without torch can import this.

Every worker of a group makes the same calls in the same order; a call returns when all have made it, or raises
HangError after the group's timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from rlinf_embodied.errors import HangError

if TYPE_CHECKING:
    from torch import Tensor


class Group(Protocol):
    """The workers that take part in a collective, numbered by rank."""

    rank: int
    size: int

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        """Returns the tensors of all ranks, by rank and in the order in which each rank gave them.

        What this rank gave may come back as the same objects: write into neither.

        Args:
            tensors: `counts[rank]` tensors; over all ranks of one shape and dtype.
            counts: how many each rank gives, at least one; known to everyone, so that nothing is negotiated.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over ranks, in an order of the backend's choice; `tensor` is left as it is."""
        ...


class SoloGroup:
    """A group of one."""

    rank = 0
    size = 1

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        assert list(counts) == [len(tensors)], f"a group of one cannot hold the tensors of {len(counts)} ranks"
        return [list(tensors)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class ThreadGroup:
    """Threads of one process, each with its own member object; see `make`."""

    def __init__(self, rank: int, slots: list[list[Tensor]], barrier: threading.Barrier, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier
        self._timeout_s = timeout_s

    @staticmethod
    def make(size: int, timeout_s: float = 600.0) -> list[ThreadGroup]:
        """Returns the members of a new group, by rank."""
        slots: list[list[Tensor]] = [[] for _ in range(size)]
        barrier = threading.Barrier(size)
        return [ThreadGroup(rank, slots, barrier, timeout_s) for rank in range(size)]

    def close(self) -> None:
        """Ends the wait of every member, now and later: one of them failed, or left."""
        self._barrier.abort()

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        assert counts[self.rank] == len(tensors), f"rank {self.rank} gives {len(tensors)} tensors, not {counts}"
        return self._meet(list(tensors), "exchange")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The order is that of the ranks."""
        total, *others = (part[0] for part in self._meet([tensor], "all_reduce"))
        for other in others:
            total += other  # a copy that _meet made
        return total

    def _meet(self, tensors: list[Tensor], operation: str) -> list[list[Tensor]]:
        """Puts down what this rank has, waits for all, and copies it before anyone may change it again."""
        self._slots[self.rank] = tensors
        try:
            self._barrier.wait(self._timeout_s)
            # plain numbers (of emulated stages) nobody can change
            copied = lambda v: v if isinstance(v, (float, int)) else v.to(tensors[0].device, copy=True)  # noqa: E731
            everything = [[copied(value) for value in slot] for slot in self._slots]
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise HangError(
                f"rank {self.rank} of {self.size} waited {self._timeout_s:g} s for the others in {operation}: "
                "one of them failed, hangs, or makes other calls; look for its error"
            ) from None
        return cast("list[list[Tensor]]", everything)
