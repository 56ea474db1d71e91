"""N `PhysxCpuSystem`s behind the part of `PhysxGpuSystem`'s interface that ManiSkill uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partialmethod
from types import SimpleNamespace

import numpy as np
import sapien
import torch
from sapien import physx

from envs.batched.buffers import ANGULAR, LINEAR, POSE, BodyBuffer, CellBuffer, Drives, RowSets, index_packs
from envs.batched.contacts import ContactTable
from envs.batched.scene_recreation import recreated_scene

_ZERO = np.zeros(3, np.float32)


class PhysicsBatch:
    """Stands in for one PhysxGpuSystem, with one CPU system per scene.

    Reads: each changed scene is packed once per state; one index operation scatters the joined packs into the `cuda_*`
    tensors.  Writes: `gpu_apply_*` passes the assigned cells to SAPIEN with the calls of ManiSkill's CPU path.
    Scenes that are not in `active` are neither stepped nor given drive targets.
    """

    def __init__(self, scenes: list[sapien.Scene], rendering: bool) -> None:
        """`scenes` is shared with the ManiSkillScene, `recreate_scene` replaces its items; `rendering`: they render."""
        self.scenes, self.rendering = scenes, rendering
        self.systems: list[physx.PhysxCpuSystem] = [scene.physx_system for scene in scenes]
        self.num_scenes = len(scenes)
        self.active = list(range(self.num_scenes))
        self.contacts = ContactTable(self.systems, self._scene_of)
        self.gpu_create_contact_pair_impulse_query = self.gpu_create_contact_body_impulse_query = (
            self.contacts.create_query
        )
        self.gpu_query_contact_pair_impulses = self.gpu_query_contact_body_impulses = self.contacts.run_query
        self._calls = [_bound(scene) for scene in scenes]
        self._packs, self._pose_packs = [b""] * self.num_scenes, [b""] * self.num_scenes
        self._stale: set[int] = set()
        self._unjoined = self._bodies_old = self._joints_old = True
        self._invalidate(range(self.num_scenes))

    def _invalidate(self, scenes: Collection[int]) -> None:
        if not scenes:
            return
        self._stale.update(scenes)
        self.contacts.invalidate(scenes)
        self._unjoined = self._bodies_old = self._joints_old = True

    # ------------------------------------------------------------------------------------ properties of a physx system
    @property
    def timestep(self) -> float:
        return self.systems[0].timestep

    @timestep.setter
    def timestep(self, value: float) -> None:
        for system in self.systems:
            system.timestep = value

    @property
    def rigid_dynamic_components(self) -> list[physx.PhysxRigidDynamicComponent]:
        return [body for system in self.systems for body in system.rigid_dynamic_components]

    @property
    def rigid_static_components(self) -> list[physx.PhysxRigidStaticComponent]:
        return [body for system in self.systems for body in system.rigid_static_components]

    @property
    def articulation_link_components(self) -> list[physx.PhysxArticulationLinkComponent]:
        return [link for system in self.systems for link in system.articulation_link_components]

    def get_scene_offset(self, scene: sapien.Scene) -> np.ndarray:
        """Returns zeros: scenes are separate."""
        return np.zeros(3, dtype=np.float32)

    # ---------------------------------------------------------------------------------------------------- construction
    def gpu_init(self) -> None:
        """Allocates the tensors of the bodies and articulations that are numbered."""
        links = [isinstance(body, physx.PhysxArticulationLinkComponent) for body in self.bodies]
        roots = [link and body.is_root for link, body in zip(links, self.bodies, strict=True)]
        self._is_link = np.array(links, bool)
        self._is_actor = ~self._is_link
        self._is_root = np.array(roots, bool)
        kinematic = [not link and body.kinematic for link, body in zip(links, self.bodies, strict=True)]
        self._is_dynamic = ~self._is_link & ~np.array(kinematic, bool)
        self.cuda_rigid_body_data = BodyBuffer.zeros(self.row_sets, len(self.bodies), 13)
        self.cuda_rigid_body_data.links = {
            row: body for row, body in enumerate(self.bodies) if links[row] and not roots[row]
        }
        self.cuda_rigid_body_force = CellBuffer.zeros(self.row_sets, len(self.bodies), 3)
        self.dof = max((articulation.dof for articulation in self.articulations), default=0)
        for name in ("qpos", "qvel", "qf", "target_qpos", "target_qvel"):
            buffer = CellBuffer.zeros(self.row_sets, len(self.articulations), self.dof)
            setattr(self, f"cuda_articulation_{name}", buffer)
        joints = [j for a in self.articulations for j in [*a.active_joints, *[None] * (self.dof - a.dof)]]
        position = [joint and joint.set_drive_target for joint in joints]
        velocity = [joint and joint.set_drive_velocity_target for joint in joints]
        self.position_drives = Drives(self.cuda_articulation_target_qpos, position, self.articulation_scene)
        self.velocity_drives = Drives(self.cuda_articulation_target_qvel, velocity, self.articulation_scene)
        self._layout = index_packs(self.scenes, self.body_row, self.articulation_row, self.dof)

    def number(self) -> None:
        """Numbers the bodies and articulations of all scenes, which must be complete."""
        self.row_sets = RowSets()
        self.bodies, self.body_row, self.body_scene = [], {}, []
        self.articulations, self.articulation_row, self.articulation_scene = [], {}, []
        for i, system in enumerate(self.systems):
            for body in [*system.rigid_dynamic_components, *system.articulation_link_components]:
                self.body_row[body] = len(self.bodies)
                self.bodies.append(body)
                self.body_scene.append(i)
            for link in system.articulation_link_components:
                if link.is_root:
                    self.articulation_row[link.articulation] = len(self.articulations)
                    self.articulations.append(link.articulation)
                    self.articulation_scene.append(i)

    def recreate_scene(self, i: int) -> None:
        """Moves everything of scene i into a new scene with a new PhysX system: the same state without its history."""
        self.scenes[i] = recreated_scene(self.scenes[i], self.rendering)
        self.systems[i] = self.scenes[i].physx_system
        self._calls[i] = _bound(self.scenes[i])
        self._invalidate([i])

    # -------------------------------------------------------------------------------------------------------- stepping
    def step(self) -> None:
        self.gpu_apply_articulation_target_position()  # interpolating controllers set targets before each step
        self.gpu_apply_articulation_target_velocity()
        for i in self.active:
            self.systems[i].step()
        self._invalidate(self.active)

    def advance(self, count: int) -> None:
        """Steps every active scene `count` times, one scene after the other from its drive targets to its contacts.

        The scenes are independent, and the work for one scene is cheap while it is in the CPU's cache.
        """
        set_position_targets = self.position_drives.take()
        set_velocity_targets = self.velocity_drives.take()

        for i in self.active:
            set_position_targets(i)
            set_velocity_targets(i)
            step, pack, pack_poses = self._calls[i]
            for _ in range(count):
                step()
            self._packs[i], self._pose_packs[i] = pack(), pack_poses()
            self.contacts.read(i)
        self._stale.difference_update(self.active)
        self._unjoined = self._bodies_old = self._joints_old = True

    def gpu_update_articulation_kinematics(self) -> None:
        """Does nothing: SAPIEN updates link poses when a CPU articulation is written."""

    # --------------------------------------------------------------------------------------------------------- reading
    def _join(self) -> None:
        """Joins the packs of all scenes, after reading those that changed."""
        for i in self._stale:
            _, pack, pack_poses = self._calls[i]
            self._packs[i], self._pose_packs[i] = pack(), pack_poses()
        self._stale.clear()
        if not self._unjoined:
            return
        self._unjoined = False
        self._flat = np.frombuffer(b"".join(self._packs), np.float32)
        self._pose_flat = np.frombuffer(b"".join(self._pose_packs), np.float32)
        if len(self._pose_flat) != self._layout.pose_pack_size:
            # entities were added, for example cameras
            self._layout = index_packs(self.scenes, self.body_row, self.articulation_row, self.dof)
        assert len(self._flat) == self._layout.pack_size, "the PhysX pack has another layout than PackLayout describes"
        assert len(self._pose_flat) == self._layout.pose_pack_size, "the pose pack has another layout than described"

    def gpu_fetch_rigid_dynamic_data(self) -> None:
        """Brings poses and velocities of bodies up to date."""
        if self._bodies_old:
            self._join()
            self.cuda_rigid_body_data.refresh(self._layout.poses, self._pose_flat)
            self.cuda_rigid_body_data.refresh(self._layout.bodies, self._flat)
            self._bodies_old = False

    gpu_fetch_articulation_link_pose = gpu_fetch_articulation_link_velocity = gpu_fetch_rigid_dynamic_data

    def gpu_fetch_articulation_qpos(self) -> None:
        if self._joints_old:
            self._join()
            for name, pairs in self._layout.joints.items():
                getattr(self, f"cuda_articulation_{name}").refresh(pairs, self._flat)
            self._joints_old = False

    gpu_fetch_articulation_qvel = gpu_fetch_articulation_qpos
    gpu_fetch_articulation_target_qpos = gpu_fetch_articulation_target_qvel = gpu_fetch_articulation_qpos

    def gpu_fetch_articulation_qacc(self) -> None:
        """Does nothing: accelerations and joint forces are gathered when they are read."""

    gpu_fetch_articulation_link_incoming_joint_forces = gpu_fetch_articulation_qacc

    @property
    def cuda_articulation_qacc(self) -> SimpleNamespace:
        return self._gathered(lambda articulation: articulation.qacc)

    @property
    def cuda_articulation_link_incoming_joint_forces(self) -> SimpleNamespace:
        return self._gathered(lambda articulation: articulation.get_link_incoming_joint_forces())

    def _gathered(self, get: Callable[[physx.PhysxArticulation], np.ndarray]) -> SimpleNamespace:
        rows = [torch.from_numpy(np.array(get(articulation))) for articulation in self.articulations]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return SimpleNamespace(torch=lambda: padded)

    # --------------------------------------------------------------------------------------------------------- writing
    def gpu_apply_rigid_dynamic_data(self) -> None:
        """Hands assigned poses and velocities of free bodies to PhysX; a kinematic body has no velocity to set."""
        data, changed = self.cuda_rigid_body_data, set()
        for row, pose, linear, angular in data.take_dirty_rows(self._is_actor, POSE, LINEAR, ANGULAR):
            body = self.bodies[row]
            if pose:
                body.entity_pose = sapien.Pose(data.np[row, :3], data.np[row, 3:7])
            if linear and self._is_dynamic[row]:
                body.set_linear_velocity(data.np[row, LINEAR])
            if angular and self._is_dynamic[row]:
                body.set_angular_velocity(data.np[row, ANGULAR])
            changed.add(self.body_scene[row])
        self._invalidate(changed)

    def gpu_apply_rigid_dynamic_force(self) -> None:
        """Hands assigned forces to PhysX, at the bodies' centres of mass."""
        force = self.cuda_rigid_body_force
        for row, _ in force.take_dirty_rows():
            body = self.bodies[row]
            body.add_force_at_point(force.np[row], (body.entity_pose * body.cmass_local_pose).p)

    def gpu_apply_articulation_root_pose(self) -> None:
        """Hands assigned poses and velocities of roots to PhysX; those of other links follow from the joints."""
        data, changed = self.cuda_rigid_body_data, set()
        for row, pose, linear, angular in data.take_dirty_rows(self._is_link, POSE, LINEAR, ANGULAR):
            if not self._is_root[row]:
                continue
            link = self.bodies[row]
            if pose:
                link.entity_pose = sapien.Pose(data.np[row, :3], data.np[row, 3:7])
            if linear:
                link.articulation.set_root_linear_velocity(data.np[row, LINEAR])
            if angular:
                link.articulation.set_root_angular_velocity(data.np[row, ANGULAR])
            changed.add(self.body_scene[row])
        self._invalidate(changed)

    gpu_apply_articulation_root_velocity = gpu_apply_articulation_root_pose

    def stop(self, scenes: Iterable[int]) -> None:
        """Sets all velocities in these scenes to zero, in ManiSkill's order."""
        scenes = set(scenes)
        for i in scenes:
            for body in self.systems[i].rigid_dynamic_components:
                if not body.kinematic:
                    body.set_linear_velocity(_ZERO)
                    body.set_angular_velocity(_ZERO)
        for i, articulation in zip(self.articulation_scene, self.articulations, strict=True):
            if i in scenes:
                articulation.qvel = np.zeros(articulation.dof, np.float32)
                articulation.set_root_linear_velocity(_ZERO)
                articulation.set_root_angular_velocity(_ZERO)
        self._invalidate(scenes)

    def _apply_joint_values(self, name: str) -> None:
        buffer, changed = getattr(self, f"cuda_articulation_{name}"), set()
        for row, _ in buffer.take_dirty_rows():
            articulation = self.articulations[row]
            setattr(articulation, name, buffer.np[row, : articulation.dof])
            changed.add(self.articulation_scene[row])
        self._invalidate(changed)

    gpu_apply_articulation_qpos = partialmethod(_apply_joint_values, "qpos")
    gpu_apply_articulation_qvel = partialmethod(_apply_joint_values, "qvel")
    gpu_apply_articulation_qf = partialmethod(_apply_joint_values, "qf")

    def _apply_targets(self, drives: Drives) -> None:
        set_targets = drives.take()
        for i in self.active:
            set_targets(i)

    def gpu_apply_articulation_target_position(self) -> None:
        self._apply_targets(self.position_drives)

    def gpu_apply_articulation_target_velocity(self) -> None:
        self._apply_targets(self.velocity_drives)

    # -------------------------------------------------------------------------------------------------------- contacts
    def _scene_of(self, *bodies: physx.PhysxRigidBaseComponent) -> int:
        return next(self.body_scene[self.body_row[body]] for body in bodies if body in self.body_row)


def _bound(scene: sapien.Scene) -> tuple[Callable[[], None], Callable[[], bytes], Callable[[], bytes]]:
    """Returns a scene's step, pack and pack_poses: looking a method up costs as much as calling it."""
    return scene.physx_system.step, scene.physx_system.pack, scene.pack_poses
