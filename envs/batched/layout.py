"""Where the values of bodies and joints lie in the byte packs that SAPIEN hands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sapien
from sapien import physx

JOINT_BUFFERS = ("qpos", "qvel", "target_qpos", "target_qvel")


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Index pairs (flat cell of a buffer, position in the joined packs of all scenes).

    `PhysxCpuSystem.pack()` holds, as float32: for each dynamic component q p v w; then for each articulation root
    q p v w, qpos, qvel, and per joint (position target, velocity target) interleaved.  `Scene.pack_poses()` holds q p
    of every entity, links included, in the order of `scene.entities`.
    """

    body_cells: np.ndarray
    body_source: np.ndarray
    pose_cells: np.ndarray
    pose_source: np.ndarray
    joint_cells: np.ndarray
    joint_source: dict[str, np.ndarray]
    pack_size: int  # float32 values
    pose_pack_size: int


class _Pairs:
    """Collects index pairs."""

    def __init__(self) -> None:
        self.cells: list[np.ndarray] = []
        self.source: list[np.ndarray] = []

    def add(self, cells: np.ndarray, source: np.ndarray) -> None:
        self.cells.append(cells)
        self.source.append(source)

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        empty = np.zeros(0, dtype=np.int64)
        return np.concatenate([empty, *self.cells]), np.concatenate([empty, *self.source])


def index_packs(
    scenes: Sequence[sapien.Scene],
    body_row: Mapping[physx.PhysxRigidBodyComponent, int],
    articulation_row: Mapping[physx.PhysxArticulation, int],
    dof: int,
) -> PackLayout:
    """Returns the layout of the joined packs of these scenes; `dof` is the width of the joint buffers."""
    bodies, poses = _Pairs(), _Pairs()
    joints = {name: _Pairs() for name in JOINT_BUFFERS}
    at = pose_at = 0
    for scene in scenes:
        system = scene.physx_system
        entity_index = {entity: k for k, entity in enumerate(scene.entities)}
        for body in [*system.rigid_dynamic_components, *system.articulation_link_components]:
            start = pose_at + 7 * entity_index[body.entity]
            poses.add(13 * body_row[body] + np.arange(7), start + np.array([4, 5, 6, 0, 1, 2, 3]))
        pose_at += 7 * len(scene.entities)
        for body in system.rigid_dynamic_components:
            bodies.add(13 * body_row[body] + np.arange(7, 13), at + np.arange(7, 13))
            at += 13
        for root in (link for link in system.articulation_link_components if link.is_root):
            bodies.add(13 * body_row[root] + np.arange(7, 13), at + np.arange(7, 13))
            at = _add_joints(joints, articulation_row[root.articulation] * dof, root.articulation.dof, at + 13)
    joint_pairs = {name: pairs.joined() for name, pairs in joints.items()}
    return PackLayout(
        *bodies.joined(),
        *poses.joined(),
        joint_cells=joint_pairs["qpos"][0],
        joint_source={name: source for name, (_, source) in joint_pairs.items()},
        pack_size=at,
        pose_pack_size=pose_at,
    )


def _add_joints(joints: dict[str, _Pairs], cell: int, dof: int, at: int) -> int:
    """Adds the joints of one articulation, whose values start at `at`; returns where the next component starts."""
    cells, k = cell + np.arange(dof), np.arange(dof)
    joints["qpos"].add(cells, at + k)
    joints["qvel"].add(cells, at + dof + k)
    joints["target_qpos"].add(cells, at + 2 * dof + 2 * k)
    joints["target_qvel"].add(cells, at + 2 * dof + 2 * k + 1)
    return at + 4 * dof
