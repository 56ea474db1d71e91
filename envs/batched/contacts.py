"""Contact impulses of N CPU scenes behind the query interface of `PhysxGpuSystem`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import torch
from mani_skill.utils import sapien_utils
from sapien import physx

Contact = tuple[physx.PhysxContact, bool]  # and whether the body asked for comes first in it


class ContactTable:
    """Looks contacts up by body or pair of bodies; a scene's contacts are fetched once per simulation state."""

    def __init__(self, systems: list[physx.PhysxCpuSystem], scene_of: Callable[..., int]) -> None:
        """`systems` is shared with the physics, which replaces items; `scene_of(*bodies)` gives the scene's number."""
        self._systems, self._scene_of = systems, scene_of
        self._tables: list[dict] = [{} for _ in systems]
        self._stale = set(range(len(systems)))

    def invalidate(self, scenes: Iterable[int]) -> None:
        """Says that the state of these scenes changed."""
        self._stale.update(scenes)

    def create_query(self, keys: Sequence) -> SimpleNamespace:
        """Returns a query for the total impulse on each body, or between each pair of bodies, in `keys`."""
        pairs = [key if isinstance(key, tuple) else (key,) for key in keys]
        impulses = torch.zeros(len(keys), 3)
        return SimpleNamespace(
            keys=[(self._scene_of(*pair), key) for pair, key in zip(pairs, keys, strict=True)],
            cuda_impulses=SimpleNamespace(torch=lambda: impulses),
        )

    def run_query(self, query: SimpleNamespace) -> None:
        """Fills `query.cuda_impulses` [K, 3] (N s), summed over contact points as ManiSkill does on the CPU."""
        impulses = query.cuda_impulses.torch()
        impulses.zero_()
        for k, (scene, key) in enumerate(query.keys):
            found = self._table(scene).get(key)
            if found:
                impulses[k] = torch.from_numpy(sapien_utils.compute_total_impulse(found))

    def _table(self, scene: int) -> dict[object, list[Contact]]:
        if scene in self._stale:
            self._stale.discard(scene)
            table: dict[object, list[Contact]] = {}
            for contact in self._systems[scene].get_contacts():
                first, second = contact.bodies
                for key, flag in ((first, True), (second, False), ((first, second), True), ((second, first), False)):
                    table.setdefault(key, []).append((contact, flag))
            self._tables[scene] = table
        return self._tables[scene]
