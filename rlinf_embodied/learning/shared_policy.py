"""A worker's one copy of a policy, used by all of its stages that hold the same weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import nn


class _HasModule(Protocol):
    module: nn.Module


_Policy = TypeVar("_Policy", bound=_HasModule)


@dataclass(slots=True)
class SharedPolicy(Generic[_Policy]):
    """A policy with the version of its weights.

    It is on its device as long as one of its users is.
    """

    policy: _Policy
    version: int = 0
    device: str = "cpu"
    users: set[str] = field(default_factory=set)

    def enter(self, user: str) -> None:
        """Notes that a stage works with it, and brings it to its device."""
        self.users.add(user)
        self.policy.module.to(self.device)

    def leave(self, user: str) -> None:
        """Notes that a stage no longer does; the last one sends it to the CPU's memory."""
        self.users.discard(user)
        if not self.users:
            self.policy.module.to("cpu")
