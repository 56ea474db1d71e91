"""Tensors that record which of their cells were assigned, in place of SAPIEN's CUDA arrays.

Also drive targets, and the positions of the values of bodies and joints in SAPIEN's byte packs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import call
from typing import Self

import numpy as np
import sapien
import torch
from sapien import physx
from torch import Tensor

POSE, LINEAR, ANGULAR = slice(7), slice(7, 10), slice(10, 13)  # columns of a rigid-body row: p q v w


class RowSets:
    """Row numbers that are used repeatedly, as views if they are evenly spaced.

    An index operation costs three times what copying a view does, and a step makes dozens.
    """

    def __init__(self) -> None:
        self._spaced: dict[int, tuple[Tensor, slice]] = {}  # by id; the reference to the tensor keeps its id unique
        self._views: dict[tuple, Tensor] = {}
        self._cells: dict[tuple[int, int], tuple[Tensor, np.ndarray]] = {}

    def added(self, rows: Tensor) -> Tensor:
        """Returns these row numbers, which must not change, and stores them if they are evenly spaced."""
        numbers = rows.tolist()
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        if step > 0 and numbers == list(range(numbers[0], numbers[0] + step * len(numbers), step)):
            self._spaced[id(rows)] = rows, slice(numbers[0], numbers[-1] + 1, step)
        return rows

    def view(self, buffer: CellBuffer, rows: object, columns: slice) -> Tensor | None:
        """Returns the view of these rows and columns of a buffer, None if the rows are not stored."""
        spaced = self._spaced.get(id(rows))
        if spaced is None:
            return None
        key = id(buffer), id(rows), columns.start, columns.stop, columns.step
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = buffer.values[spaced[1], columns]
        return view

    def cells(self, buffer: CellBuffer, rows: Tensor, columns: Tensor) -> np.ndarray:
        """Returns the flat cells of a buffer at rows and columns of any shape, which must not change later."""
        key = id(buffer), id(rows)
        if key not in self._cells:
            self._cells[key] = rows, (rows.long() * buffer.shape[1] + columns).numpy()
        return self._cells[key][1]


class CellBuffer(Tensor):
    """A CPU tensor in place of a SAPIEN CudaArray that records the cells assigned since they were last applied.

    SAPIEN must be given exactly the assigned cells, including unchanged values: assigning wakes a body up, so comparing
    values with those of the last step would not be enough.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # results of operations are plain tensors

    row_sets: RowSets
    values: Tensor
    np: np.ndarray
    dirty: Tensor
    touched: bool

    @classmethod
    def zeros(cls, row_sets: RowSets, *shape: int) -> Self:
        """Returns a buffer of zeros, float32, no cell assigned; `row_sets` are the row numbers used repeatedly."""
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
        self.np.reshape(-1)[cells] = values
        self.dirty.numpy().reshape(-1)[cells] = True
        self.touched = True

    def refresh(self, pairs: np.ndarray, pack: np.ndarray) -> None:
        """Overwrites cells with values of a pack, by `pairs` of both, except those assigned and not yet applied."""
        (cells, source), flat = pairs, self.np.reshape(-1)
        values = pack[source]
        if self.touched:
            keep = self.dirty.numpy().reshape(-1)[cells]
            values = np.where(keep, flat[cells], values)
        flat[cells] = values

    def take_dirty_rows(self, among: np.ndarray | None = None, *columns: slice) -> Iterable[tuple]:
        """Returns rows with assigned cells (of the bool mask `among`) and forgets the assignments.

        Each is a row number followed, for each of `columns` (default: all), by whether a cell in it was assigned.
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
        self.dirty.numpy()[:] = False
        self.touched = False


class BodyBuffer(CellBuffer):
    """Rows of position, quaternion, linear and angular velocity, one per rigid body.

    SAPIEN's packs lack the velocities of links below an articulation's root; these are fetched when they are read.
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
        """Takes the assigned targets and returns a function that sets those of one scene.

        Targets of scenes at rest are dropped: their next episode sets new ones.
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

        This is cached, since most steps assign the same cells, those of the controllers.
        """
        cells = np.frombuffer(dirty, bool).nonzero()[0]
        setters = [self.setters[cell] for cell in cells.tolist()]
        return cells, setters, np.searchsorted(cells, self._first_cell).tolist()


JOINT_BUFFERS = ("qpos", "qvel", "target_qpos", "target_qvel")


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Index pairs int64 [2, P]: flat cells of a buffer, and positions in the joined packs of all scenes.

    `PhysxCpuSystem.pack()` holds, as float32: for each dynamic component q p v w; then for each articulation root
    q p v w, qpos, qvel, and per joint (position target, velocity target) interleaved.  `Scene.pack_poses()` holds q p
    of every entity, links included, in the order of `scene.entities`.
    """

    bodies: np.ndarray  # velocities
    poses: np.ndarray
    joints: dict[str, np.ndarray]  # by JOINT_BUFFERS
    pack_size: int  # float32 values
    pose_pack_size: int


def index_packs(
    scenes: Sequence[sapien.Scene],
    body_row: Mapping[physx.PhysxRigidBodyComponent, int],
    articulation_row: Mapping[physx.PhysxArticulation, int],
    dof: int,
) -> PackLayout:
    """Returns the layout of the joined packs of these scenes; `dof` is the width of the joint buffers."""
    none = np.zeros((2, 0), np.int64)
    bodies, poses, joints = [none], [none], {name: [none] for name in JOINT_BUFFERS}
    at = pose_at = 0
    for scene in scenes:
        system = scene.physx_system
        entity_index = {entity: k for k, entity in enumerate(scene.entities)}
        for body in [*system.rigid_dynamic_components, *system.articulation_link_components]:
            start = pose_at + 7 * entity_index[body.entity]
            poses.append(np.stack([13 * body_row[body] + np.arange(7), start + np.array([4, 5, 6, 0, 1, 2, 3])]))
        pose_at += 7 * len(scene.entities)
        roots = [link for link in system.articulation_link_components if link.is_root]
        for body in [*system.rigid_dynamic_components, *roots]:
            bodies.append(np.stack([13 * body_row[body] + np.arange(7, 13), at + np.arange(7, 13)]))
            at += 13
            if isinstance(body, physx.PhysxArticulationLinkComponent):
                number, k = body.articulation.dof, np.arange(body.articulation.dof)
                cells = articulation_row[body.articulation] * dof + k
                places = (k, number + k, 2 * number + 2 * k, 2 * number + 2 * k + 1)
                for name, place in zip(JOINT_BUFFERS, places, strict=True):
                    joints[name].append(np.stack([cells, at + place]))
                at += 4 * number
    of_joints = {name: np.concatenate(pairs, 1) for name, pairs in joints.items()}
    return PackLayout(np.concatenate(bodies, 1), np.concatenate(poses, 1), of_joints, at, pose_at)
