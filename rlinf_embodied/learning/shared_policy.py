"""A worker's one copy of a policy, used by all of its stages that hold the same weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn


def move(module: nn.Module, device: str) -> None:
    """Moves a module to a device; its parameters stay the objects that learners hold and that its parts share.

    `nn.Module.to` alone would put new ones in their place where torch does not exchange data between the two kinds of
    device, as for every kind that a plug-in brings: a learner would keep training the old ones, and an embedding that
    is the head's weight too would become two.
    """
    there = torch.device(device)
    for parameter in module.parameters():
        if parameter.device != there:
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(there), parameter.requires_grad))
    module.to(there)  # what are no parameters


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
        move(self.policy.module, self.device)

    def leave(self, user: str) -> None:
        """Notes that a stage no longer does; the last one sends it to the CPU's memory."""
        self.users.discard(user)
        if not self.users:
            move(self.policy.module, "cpu")
