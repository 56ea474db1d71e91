"""Drive targets of N scenes' joints, set scene by scene."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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

    def take(self) -> Callable[[int], object]:
        """Takes the assigned targets and returns what sets those of one scene.

        Targets of scenes at rest are dropped thereby: their next episode sets its own.
        """
        cells = self.buffer.take_dirty_cells()
        if not cells:
            return lambda scene: None
        values = self.buffer.np.reshape(-1)[cells].tolist()
        setters = [self.setters[cell] for cell in cells]
        first = np.searchsorted(cells, self._first_cell).tolist()

        def set_targets(scene: int) -> None:
            part = slice(first[scene], first[scene + 1])
            deque(map(call, setters[part], values[part]), 0)

        return set_targets
