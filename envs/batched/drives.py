"""Drive targets of N scenes' joints, set scene by scene."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import call

import numpy as np

from envs.batched.buffers import CellBuffer

Setter = Callable[[float], None]


class Drives:
    """One kind of drive target (position or velocity) of all joints: a buffer of assigned values and their setters."""

    def __init__(self, buffer: CellBuffer, setters: Sequence[Setter | None], scene_of_row: Sequence[int]) -> None:
        """`setters` has one entry per cell (None: no such joint); `scene_of_row` ascends, one entry per buffer row."""
        self.buffer, self.setters = buffer, setters
        num_scenes = max(scene_of_row, default=-1) + 1
        self._first_cell = np.searchsorted(scene_of_row, np.arange(num_scenes + 1)) * buffer.shape[1]
        self._split = lru_cache(maxsize=8)(self._split_cells)

    def take(self) -> Callable[[int], object]:
        """Takes the assigned targets and returns what sets those of one scene.

        Targets of scenes at rest are dropped thereby: their next episode sets its own.
        """
        if not self.buffer.touched:
            return lambda scene: None
        cells, setters, first = self._split(self.buffer.dirty.numpy().tobytes())
        if not setters:
            return lambda scene: None
        values = self.buffer.np.reshape(-1)[cells].tolist()
        self.buffer.forget()

        def set_targets(scene: int) -> None:
            part = slice(first[scene], first[scene + 1])
            deque(map(call, setters[part], values[part]), 0)

        return set_targets

    def _split_cells(self, dirty: bytes) -> tuple[np.ndarray, list[Setter], list[int]]:
        """Returns the assigned cells, their setters, and where those of each scene begin.

        The cells are the same ones in most steps, those of the controllers, so that this is kept.
        """
        cells = np.frombuffer(dirty, bool).nonzero()[0]
        setters = [self.setters[cell] for cell in cells.tolist()]
        return cells, setters, np.searchsorted(cells, self._first_cell).tolist()
