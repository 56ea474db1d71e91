"""The group of a collective stage; its waits are visible to health checks, and end when its calls are abandoned.

member 0   exchange ...waits...                      raises when its calls are abandoned, or a member's process ends
member 1             fails before it enters -------> closes its end
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_embodied.errors import StaleCallError
from rlinf_embodied.learning.groups import Group
from rlinf_embodied.runtime.worker_state import WorkerState

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")
Key = tuple[object, ...]


class StageGroup:
    """One member of a group; see learning/groups.py for the protocol."""

    def __init__(self, group: Group, stage: str, state: WorkerState) -> None:
        """Wraps a group; `state` records its waits."""
        self._group, self._stage, self._state = group, stage, state
        self.rank, self.size = group.rank, group.size
        self._busy, self._lock = False, threading.Lock()
        self._closed = False
        state.join(stage, self.rank)

    def __getattr__(self, name: str) -> object:
        """Returns attributes of the group beyond the protocol, such as its store."""
        return getattr(self._group, name)

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        return self._meet("exchange", lambda: self._group.exchange(tensors, counts))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._meet("all_reduce", lambda: self._group.all_reduce(tensor))

    def _meet(self, operation: str, meet: Callable[[], _Result]) -> _Result:
        with self._lock:
            if self._closed:
                raise StaleCallError(f"the group of {self._stage} is closed: a member failed, or its call was given up")
            self._busy = True
        try:
            with self._state.meeting(self._stage, operation):
                return meet()
        finally:
            self._busy = False

    def close(self) -> None:
        """Leaves the group; a waiting member is woken if its backend can do that from another thread.

        Gloo cannot: its waits end when another member closes its connections or is killed.
        """
        with self._lock:
            if self._closed or self.size == 1:
                return
            if self._busy:  # it closes the group itself when its wait has ended
                getattr(self._group, "wake", lambda: None)()
                return
            self._closed = True
        self._group.close()  # pyright: ignore[reportAttributeAccessIssue]


class Mailbox:
    """Values that other workers deliver to this one, by key."""

    def __init__(self) -> None:
        self._values: dict[Key, object] = {}
        self._changed = threading.Condition()

    def deliver(self, key: Key, value: object) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: Key, is_open: Callable[[], bool]) -> object:
        """Waits for a value; raises a StaleCallError where `is_open` is false after a delivery, or `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or not is_open())
            if key not in self._values:
                raise StaleCallError("a wait in a collective was given up")
            return self._values.pop(key)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class MailGroup:
    """A group for plain values, of workers without torch: all send to rank 0, which sends everything to all."""

    def __init__(self, name: str, rank: int, deliver: Mapping[int, Callable[[Key, object], object]], mail: Mailbox):
        """Joins a group; `name` must be unique, `deliver` sends to each member by rank, `mail` is this member's box."""
        self.rank, self.size = rank, len(deliver)
        self._name, self._deliver, self._mail = name, deliver, mail
        self._number, self._open = 0, True

    def exchange(self, tensors: Sequence[object], counts: Sequence[int]) -> list[list[object]]:
        """Gives values, whatever can be pickled, to all members; returns everyone's, by rank."""
        assert counts[self.rank] == len(tensors), f"rank {self.rank} gives {len(tensors)} of {counts[self.rank]} values"
        self._number += 1
        if self.rank:
            self._deliver[0]((self._name, self._number, self.rank), list(tensors))
            return self._take("all")
        everything = [list(tensors), *(self._take(rank) for rank in range(1, self.size))]
        for rank in range(1, self.size):
            self._deliver[rank]((self._name, self._number, "all"), everything)
        return everything

    def _take(self, sender: object) -> Any:
        return self._mail.take((self._name, self._number, sender), lambda: self._open)

    def close(self) -> None:
        """Ends this member's wait, now and later."""
        self._open = False
        self._mail.wake()

    wake = close
