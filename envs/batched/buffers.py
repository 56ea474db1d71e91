"""Tensors that remember which of their cells were assigned, standing in for SAPIEN's CUDA arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np
import torch
from torch import Tensor

POSE, LINEAR, ANGULAR = slice(7), slice(7, 10), slice(10, 13)  # columns of a rigid-body row: p q v w


class RowSets:
    """Row numbers that are asked for again and again, as views where they are evenly spaced.

    An index operation costs three times what copying a view does, and a step makes dozens.
    """

    def __init__(self) -> None:
        self._spaced: dict[int, tuple[Tensor, slice]] = {}  # by id; the tensor is kept so that its id stays its own
        self._views: dict[tuple, Tensor] = {}
        self._cells: dict[tuple[int, int], tuple[Tensor, np.ndarray]] = {}

    def added(self, rows: Tensor) -> Tensor:
        """Returns these row numbers, which nobody may change, and remembers them if they are evenly spaced."""
        numbers = rows.tolist()
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        if step > 0 and numbers == list(range(numbers[0], numbers[0] + step * len(numbers), step)):
            self._spaced[id(rows)] = rows, slice(numbers[0], numbers[-1] + 1, step)
        return rows

    def view(self, buffer: CellBuffer, rows: object, columns: slice) -> Tensor | None:
        """Returns the view of these rows and columns of a buffer, None if the rows are not remembered."""
        spaced = self._spaced.get(id(rows))
        if spaced is None:
            return None
        key = id(buffer), id(rows), columns.start, columns.stop, columns.step
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = buffer.values[spaced[1], columns]
        return view

    def cells(self, buffer: CellBuffer, rows: Tensor, columns: Tensor) -> np.ndarray:
        """Returns the flat cells of a buffer at rows and columns of any shape, tensors that nobody will change."""
        key = id(buffer), id(rows)
        if key not in self._cells:
            self._cells[key] = rows, (rows.long() * buffer.shape[1] + columns).numpy()
        return self._cells[key][1]


class CellBuffer(Tensor):
    """A CPU tensor that plays a SAPIEN CudaArray and remembers the cells assigned since they were last applied.

    SAPIEN must be given exactly the assigned cells, unchanged values included: assigning wakes a body up, so comparing
    values with those of the last step would not do.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # results of operations are plain tensors

    row_sets: RowSets
    values: Tensor
    np: np.ndarray
    dirty: Tensor
    touched: bool

    @classmethod
    def zeros(cls, row_sets: RowSets, *shape: int) -> Self:
        """Returns a buffer of zeros, float32, no cell assigned; `row_sets` are those it will often be asked for."""
        self = torch.zeros(shape).as_subclass(cls)
        self.row_sets = row_sets
        self.values = self.as_subclass(Tensor)
        self.np = self.values.numpy()
        self.dirty = torch.zeros(shape, dtype=torch.bool)
        self.touched = False
        return self

    def torch(self) -> Self:
        """Returns itself (the interface of a CudaArray)."""
        return self

    def __getitem__(self, key: object) -> Tensor:
        if type(key) is tuple and type(key[1]) is slice:
            view = self.row_sets.view(self, *key)
            if view is not None:
                return view.clone()
        return self.values[key]

    def __setitem__(self, key: object, value: object) -> None:
        self.values[key] = value
        self.dirty[key] = True
        self.touched = True

    def assign(self, cells: np.ndarray, values: np.ndarray) -> None:
        """Assigns flat cells."""
        self.np.reshape(-1)[cells] = values
        self.dirty.numpy().reshape(-1)[cells] = True
        self.touched = True

    def refresh(self, cells: np.ndarray, values: np.ndarray) -> None:
        """Overwrites flat cells with the simulation's values, except those assigned and not yet applied."""
        flat = self.np.reshape(-1)
        if self.touched:
            keep = self.dirty.numpy().reshape(-1)[cells]
            values = np.where(keep, flat[cells], values)
        flat[cells] = values

    def take_dirty_rows(self, among: np.ndarray | None = None, *columns: slice) -> Iterable[tuple]:
        """Returns rows with assigned cells (`among` these, bool) and forgets the assignments.

        Each comes as its number and, for each of `columns`, whether a cell there was assigned (default: in all).
        """
        if not self.touched:
            return ()
        dirty = self.dirty.numpy()
        rows = dirty.any(1)
        if among is not None:
            rows &= among
        numbers = rows.nonzero()[0]
        cells = dirty[numbers]
        dirty[numbers] = False
        self.touched = among is not None and bool(dirty.any())
        parts = [cells[:, part].any(1).tolist() for part in columns or (slice(None),)]
        return zip(numbers.tolist(), *parts, strict=True)

    def forget(self) -> None:
        """Forgets all assignments."""
        self.dirty.numpy()[:] = False
        self.touched = False


class BodyBuffer(CellBuffer):
    """Rows of position, quaternion, linear and angular velocity, one per rigid body.

    SAPIEN's packs lack the velocities of links below an articulation's root; they are gathered when they are read.
    """

    links: dict[int, object]  # row -> link below a root

    def __getitem__(self, key: object) -> Tensor:
        rows, columns = key if isinstance(key, tuple) else (key, LINEAR)
        if isinstance(rows, Tensor) and columns != POSE:
            for row in rows.tolist():
                link = self.links.get(row)
                if link is not None:
                    self.np[row, LINEAR] = link.linear_velocity
                    self.np[row, ANGULAR] = link.angular_velocity
        return super().__getitem__(key)
