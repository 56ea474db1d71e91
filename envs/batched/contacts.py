"""Contact impulses of N CPU scenes behind the query interface of `PhysxGpuSystem`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from sapien import physx

Contact = tuple[physx.PhysxContact, bool]  # and whether the queried body comes first in it


class ContactTable:
    """Looks contacts up by body or pair of bodies; a scene's contacts are fetched once per simulation state.

    Only contacts of queried bodies are kept: a robot that stands on a table has many other contacts.
    """

    def __init__(self, systems: list[physx.PhysxCpuSystem], scene_of: Callable[..., int]) -> None:
        """`systems` is shared with the physics, which replaces items; `scene_of(*bodies)` returns a scene number."""
        self._systems, self._scene_of = systems, scene_of
        self._tables: dict[int, dict[object, list[Contact]]] = {}  # by scene, those that are not empty
        self._stale = set(range(len(systems)))
        self._single: set[object] = set()  # bodies of single queries
        self._paired: set[object] = set()  # bodies of pair queries

    def invalidate(self, scenes: Iterable[int]) -> None:
        self._stale.update(scenes)

    def create_query(self, keys: Sequence) -> SimpleNamespace:
        """Returns a query for the total impulse on each body, or between each pair of bodies, in `keys`."""
        pairs = [key if isinstance(key, tuple) else (key,) for key in keys]
        for pair in pairs:
            (self._paired if len(pair) == 2 else self._single).update(pair)
        self._stale.update(range(len(self._systems)))
        impulses = torch.zeros(len(keys), 3)
        keys_of_scene: dict[int, list[tuple[int, object]]] = {}
        for k, (pair, key) in enumerate(zip(pairs, keys, strict=True)):
            keys_of_scene.setdefault(self._scene_of(*pair), []).append((k, key))
        return SimpleNamespace(keys_of_scene=keys_of_scene, cuda_impulses=SimpleNamespace(torch=lambda: impulses))

    def run_query(self, query: SimpleNamespace) -> None:
        """Fills `query.cuda_impulses` [K, 3] (N s)."""
        for scene in list(self._stale):
            self.read(scene)
        impulses = query.cuda_impulses.torch().numpy()
        impulses[:] = 0.0
        for scene, table in self._tables.items():
            for k, key in query.keys_of_scene.get(scene, ()):
                if contacts := table.get(key):
                    impulses[k] = total_impulse(contacts)

    def read(self, scene: int) -> None:
        self._stale.discard(scene)
        self._tables.pop(scene, None)
        if not self._paired and not self._single:
            return
        table: dict[object, list[Contact]] = {}
        for contact in self._systems[scene].get_contacts():
            first, second = contact.bodies
            if first in self._paired and second in self._paired:
                table.setdefault((first, second), []).append((contact, True))
                table.setdefault((second, first), []).append((contact, False))
            if first in self._single:
                table.setdefault(first, []).append((contact, True))
            if second in self._single:
                table.setdefault(second, []).append((contact, False))
        if table:
            self._tables[scene] = table


def total_impulse(contacts: Sequence[Contact]) -> np.ndarray:
    """Returns the summed impulse of contacts on the queried body, float64 [3] (N s).

    The bits are those of ManiSkill's sum on the CPU: points in float32, one after the other, contacts in float64.
    """
    total = np.zeros(3)
    for contact, first in contacts:
        impulse: np.ndarray | float = 0.0
        for number, point in enumerate(contact.points):
            impulse = np.add(impulse, point.impulse) if number else point.impulse
        if first:
            total += impulse
        else:
            total -= impulse
    return total
