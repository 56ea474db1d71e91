"""Groups of workers for collectives; importable without torch.

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
        """Returns the tensors of all ranks, by rank, in the order in which each rank passed them.

        This rank's tensors may be returned as the same objects, so write to neither.

        Args:
            tensors: `counts[rank]` tensors; all ranks' tensors have the same shape and dtype.
            counts: number of tensors of each rank, at least one; all ranks must pass the same.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over ranks, in an order that the backend chooses; `tensor` does not change."""
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
    """A group of threads of one process, each with its own object; see `make`."""

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
        """Makes present and later waits of all members raise, after one of them failed or left."""
        self._barrier.abort()

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        assert counts[self.rank] == len(tensors), f"rank {self.rank} gives {len(tensors)} tensors, not {counts}"
        return self._meet(list(tensors), "exchange")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums in the order of the ranks."""
        total, *others = (part[0] for part in self._meet([tensor], "all_reduce"))
        for other in others:
            total += other  # a copy of _meet
        return total

    def _meet(self, tensors: list[Tensor], operation: str) -> list[list[Tensor]]:
        """Publishes this rank's tensors, waits for all ranks, and copies theirs before anyone can change them."""
        self._slots[self.rank] = tensors
        try:
            self._barrier.wait(self._timeout_s)
            # numbers (of emulated stages) are immutable
            copied = lambda v: v if isinstance(v, (float, int)) else v.to(tensors[0].device, copy=True)  # noqa: E731
            copies = [[copied(value) for value in slot] for slot in self._slots]
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise HangError(
                f"rank {self.rank} of {self.size} waited {self._timeout_s:g} s for the others in {operation}: "
                "one of them failed, hangs, or makes other calls; look for its error"
            ) from None
        return cast("list[list[Tensor]]", copies)
