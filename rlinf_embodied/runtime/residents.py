"""Which stages of a worker are in its device's memory: of stages that exclude each other, one at a time.

A stage is there from its set-up on.  It leaves when one that excludes it is called (or set up), and comes back when it
is called itself; so a device is held by one of them at a time, and nothing moves that need not.
"""

from __future__ import annotations

from collections.abc import Callable

from rlinf_embodied.device import is_accelerator
from rlinf_embodied.errors import PlanError

Switch = Callable[[str, str], None]  # (stage, "offload" or "onload")


def can_leave(kind: Callable[..., object], device: str) -> bool:
    """Returns whether a class of stages can leave the memory of a device (torch's name) and come back."""
    offers = hasattr(kind, "offload") and hasattr(kind, "onload")
    return offers and not (is_accelerator(device) and getattr(kind, "stays_on_accelerators", False))


class Residents:
    """Book-keeping only; the worker makes the switches."""

    def __init__(self) -> None:
        self._exclusive: dict[str, frozenset[str]] = {}  # of every stage that was admitted
        self._offloaded: set[str] = set()

    def admit(self, name: str, kind: type, device: str, exclusive: frozenset[str], switch: Switch) -> None:
        """Makes room for a new stage, or one that takes another's place.

        Raises:
            PlanError: its class cannot leave the device's memory, but the plan takes it out.
        """
        if exclusive and not can_leave(kind, device):
            raise PlanError(
                f"the plan takes {name} out of the memory of {device} for {', '.join(sorted(exclusive))}, but a "
                f"{kind.__name__} stays there: leave it out of `exclusive`, or give {name} separate devices"
            )
        self._exclusive[name] = exclusive
        self._offloaded.discard(name)
        self._make_room(name, switch)

    def enter(self, name: str, switch: Switch) -> None:
        """Brings a stage into memory, after those have left that may not be there together with it."""
        if not self._exclusive.get(name):
            return
        self._make_room(name, switch)
        if name in self._offloaded:
            switch(name, "onload")
            self._offloaded.remove(name)

    def _make_room(self, name: str, switch: Switch) -> None:
        for other in sorted(self._exclusive[name] & (self._exclusive.keys() - self._offloaded)):
            switch(other, "offload")
            self._offloaded.add(other)
