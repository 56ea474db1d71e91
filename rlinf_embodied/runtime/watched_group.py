"""A stage's group whose waits are seen from outside, and in which nobody waits for a member that failed.

member 0   exchange ...waits...                      WorkerError at once
member 1             fails before it comes to it --> closes its end: the connections of the others break
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rlinf_embodied.errors import StaleCallError
from rlinf_embodied.learning.groups import Group
from rlinf_embodied.runtime.heartbeat import Activity

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")


class WatchedGroup:
    """One member of a group; see learning/groups.py for the protocol."""

    def __init__(self, group: Group, stage: str, activity: Activity) -> None:
        self._group, self._stage, self._activity = group, stage, activity
        self.rank, self.size = group.rank, group.size
        self._busy, self._lock = False, threading.Lock()
        self._closed = False
        activity.join(stage, self.rank, self.size)

    def __getattr__(self, name: str) -> object:
        """Returns what a kind of group has beside the protocol: its store, its limit."""
        return getattr(self._group, name)

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        return self._meet("exchange", lambda: self._group.exchange(tensors, counts))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._meet("all_reduce", lambda: self._group.all_reduce(tensor))

    def _meet(self, operation: str, meet: Callable[[], _Result]) -> _Result:
        with self._lock:
            if self._closed:
                raise StaleCallError(
                    f"the group of {self._stage} was closed: a member failed, or its call was given up"
                )
            self._busy = True
        try:
            with self._activity.meeting(self._stage, operation):
                return meet()
        finally:
            self._busy = False

    def close(self) -> None:
        """Breaks the connections to the others, unless this member is waiting for them; they do it then."""
        with self._lock:
            if self._closed or self._busy or self.size == 1:
                return
            self._closed = True
        self._group.close()  # pyright: ignore[reportAttributeAccessIssue]
