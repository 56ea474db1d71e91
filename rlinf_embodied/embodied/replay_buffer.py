"""A ring of transitions: the newest `capacity` of a block, and draws from them that are keyed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.transitions import Columns, length
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.randomness import words

_CURSOR = "cursor"  # of a state: where the next transition goes


class ReplayBuffer:
    """Transitions of one block, on the CPU; memory is taken as it fills."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._size, self._cursor = capacity, 0, 0
        self._columns: Columns = {}

    def __len__(self) -> int:
        """Returns how many transitions it holds."""
        return self._size

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one transition by column; {} of an empty one."""
        return {name: tuple(column.shape[1:]) for name, column in self._columns.items()}

    def add(self, columns: Columns) -> None:
        """Puts transitions in, in order; those that were put in first make room."""
        number = length(columns)
        assert number <= self._capacity, f"{number} transitions at once do not fit into {self._capacity}"
        if not self._columns:  # pages of the system are taken when they are first written
            self._columns = {n: torch.empty((self._capacity, *c.shape[1:]), dtype=c.dtype) for n, c in columns.items()}
        first = min(number, self._capacity - self._cursor)
        for name, column in columns.items():
            ring = self._columns[name]
            ring[self._cursor : self._cursor + first] = column[:first]
            ring[: number - first] = column[first:]
        self._cursor = (self._cursor + number) % self._capacity
        self._size = min(self._size + number, self._capacity)

    def draw(self, shape: tuple[int, ...], seed: int, purpose: str, *ids: int) -> Columns:
        """Returns transitions drawn uniformly and with replacement, every column [*shape, ...]."""
        assert self._size > 0, "there is nothing to draw from"
        keyed = words(seed, purpose, *ids, np.arange(int(np.prod(shape))))
        index = torch.from_numpy((keyed % np.uint64(self._size)).astype(np.int64))
        return {name: column.index_select(0, index).unflatten(0, shape) for name, column in self._columns.items()}

    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of all that it holds: the columns and the cursor; {} of an empty one."""
        if not self._size:
            return {}
        held = {name: column[: self._size].clone() for name, column in self._columns.items()}
        return {**held, _CURSOR: torch.tensor([self._cursor])}

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `export_state` returned.

        Raises:
            CheckpointError: it holds more than fits in, or columns of different lengths.
        """
        self._columns, self._size, self._cursor = {}, 0, 0
        held = {name: column for name, column in state.items() if name != _CURSOR}
        if not held:
            return
        lengths = {len(column) for column in held.values()}
        if len(lengths) > 1 or max(lengths) > self._capacity or _CURSOR not in state:
            raise CheckpointError(
                f"a block of the replay buffer has {sorted(lengths)} transitions and room for {self._capacity}: the "
                "checkpoint is of another run; resume with its own configuration, or use resume=never"
            )
        self.add(held)
        self._cursor = int(state[_CURSOR][0])
