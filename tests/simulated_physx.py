"""Stock ManiSkill envs on their GPU code path, on any device: all of it runs but PhysX on CUDA and its renderer.

`SimulatedPhysx` stands in for SAPIEN's PhysxGpuSystem: N CPU scenes, whose state lies in tensors on the device.  It
does what the sources of SAPIEN (src/physx/physx_system.cpp at commit 0847062 of December 2025; the package has no C++)
say, and what envs/batched, which also plays this system, does not have to:

    gpu_apply_*     hands over whole tensors, of all rows (723-741, 849-875), not only what was assigned
    gpu_fetch_*     overwrites whole tensors (568-580); poses of links follow from joints that were applied only after
                    gpu_update_articulation_kinematics or a step (711-721)
    contacts        are those of the last step, also in rows that were moved or reset since (256-266, 503-566)
    step            steps all scenes

The task is the stock class (mani_skill/envs/sapien_env.py): its reset, its controllers, with the inverse kinematics of
a GPU (agents/controllers/utils/kinematics.py 142-183 and 208-262, which asks for a device called "cuda"), its hidden
goals, which are moved away (utils/structs/actor.py 176-218).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace

import numpy as np
import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.system.backend import BackendInfo
from mani_skill.utils.registration import REGISTERED_ENVS
from mani_skill.utils.structs import Articulation, ArticulationJoint
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct
from sapien import physx

from envs.batched.contacts import ContactTable
from envs.batched.controllers import leaf_controllers
from envs.batched.rendering import CameraGroup, RenderGroup
from envs.batched.scene import BatchedScene, make_scenes, structs_of

JOINTS = ("qpos", "qvel", "qf", "target_qpos", "target_qvel")


class SimulatedPhysx:
    """N CPU scenes behind the interface of one PhysxGpuSystem, with tensors on a device."""

    def __init__(self, scenes: list[sapien.Scene], device: torch.device) -> None:
        self.systems: list[physx.PhysxCpuSystem] = [scene.physx_system for scene in scenes]
        self.device = device
        self.bodies: list = []
        self.articulations: list = []
        self._contacts = ContactTable(self.systems, self._scene_of)
        self.gpu_create_contact_pair_impulse_query = self.gpu_create_contact_body_impulse_query = self._query
        self.gpu_query_contact_pair_impulses = self.gpu_query_contact_body_impulses = self._run_query

    @property
    def timestep(self) -> float:
        """Seconds of simulated time per step."""
        return self.systems[0].timestep

    @timestep.setter
    def timestep(self, value: float) -> None:
        for system in self.systems:
            system.timestep = value

    def get_scene_offset(self, scene: sapien.Scene) -> np.ndarray:
        """Returns zeros."""
        return np.zeros(3, np.float32)

    # ---------------------------------------------------------------------------------------------------- construction
    def number(self) -> None:
        """Numbers the bodies and articulations of all scenes; they are complete."""
        self._scenes_of: dict[object, int] = {}
        for scene, system in enumerate(self.systems):
            for body in [*system.rigid_dynamic_components, *system.articulation_link_components]:
                self._scenes_of[body] = scene
        self.bodies = list(self._scenes_of)
        self.links = [isinstance(body, physx.PhysxArticulationLinkComponent) for body in self.bodies]
        roots = [body for body, link in zip(self.bodies, self.links, strict=True) if link and body.is_root]
        self.articulations = [root.articulation for root in roots]
        self.index = {each: k for k, each in enumerate(self.bodies)} | {a: k for k, a in enumerate(self.articulations)}

    def gpu_init(self) -> None:
        """Allocates the tensors."""
        dof = max((articulation.dof for articulation in self.articulations), default=0)
        self._bodies = torch.zeros(len(self.bodies), 13, device=self.device)
        self._joints = {name: torch.zeros(len(self.articulations), dof, device=self.device) for name in JOINTS}
        self.cuda_rigid_body_data = SimpleNamespace(torch=lambda: self._bodies)
        for name in JOINTS:
            setattr(self, f"cuda_articulation_{name}", SimpleNamespace(torch=lambda name=name: self._joints[name]))
            setattr(self, f"gpu_fetch_articulation_{name}", lambda name=name: self._fetch_joints(name))
        self.gpu_update_articulation_kinematics()

    # -------------------------------------------------------------------------------------------------------- stepping
    def step(self) -> None:
        """Steps all scenes."""
        for system in self.systems:
            system.step()
        self._contacts.invalidate(range(len(self.systems)))
        self.gpu_update_articulation_kinematics()

    def gpu_update_articulation_kinematics(self) -> None:
        """Makes the poses of links follow from what was applied."""
        self._link_poses = {k: _pose(self.bodies[k]) for k, link in enumerate(self.links) if link}

    # --------------------------------------------------------------------------------------------------------- reading
    def gpu_fetch_rigid_dynamic_data(self) -> None:
        """Reads all free bodies."""
        self._fetch_bodies(
            lambda k, body: not self.links[k], lambda k, body: [*_pose(body), *_velocity(body)], slice(13)
        )

    def gpu_fetch_articulation_link_pose(self) -> None:
        """Reads the poses of all links."""
        self._fetch_bodies(lambda k, body: self.links[k], lambda k, body: self._link_poses[k], slice(7))

    def gpu_fetch_articulation_link_velocity(self) -> None:
        """Reads the velocities of all links."""
        self._fetch_bodies(lambda k, body: self.links[k], lambda k, body: _velocity(body), slice(7, 13))

    def gpu_fetch_articulation_qacc(self) -> None:
        """Does nothing: no task of these tests reads accelerations."""

    def _fetch_bodies(self, chosen: Callable, read: Callable, columns: slice) -> None:
        rows = [k for k, body in enumerate(self.bodies) if chosen(k, body)]
        values = np.array([read(k, self.bodies[k]) for k in rows], np.float32)
        self._bodies[torch.tensor(rows, device=self.device), columns] = torch.from_numpy(values).to(self.device)

    def _fetch_joints(self, name: str) -> None:
        values = torch.zeros(self._joints[name].shape)
        for k, articulation in enumerate(self.articulations):
            values[k, : articulation.dof] = torch.as_tensor(np.array(_joint_values(articulation, name)))
        self._joints[name][:] = values.to(self.device)

    # --------------------------------------------------------------------------------------------------------- writing
    def gpu_apply_rigid_dynamic_data(self) -> None:
        """Writes all free bodies."""
        for body, link, row in zip(self.bodies, self.links, self._bodies.cpu().numpy(), strict=True):
            if link:
                continue
            body.entity_pose = sapien.Pose(row[:3], row[3:7])
            if not body.kinematic:
                body.set_linear_velocity(row[7:10])
                body.set_angular_velocity(row[10:13])

    def gpu_apply_articulation_root_pose(self) -> None:
        """Writes the poses of all roots."""
        for articulation, row in self._roots():
            articulation.root.entity_pose = sapien.Pose(row[:3], row[3:7])

    def gpu_apply_articulation_root_velocity(self) -> None:
        """Writes the velocities of all roots."""
        for articulation, row in self._roots():
            articulation.set_root_linear_velocity(row[7:10])
            articulation.set_root_angular_velocity(row[10:13])

    def _roots(self) -> list[tuple[physx.PhysxArticulation, np.ndarray]]:
        rows = self._bodies.cpu().numpy()
        return [(each, rows[self.index[each.root]]) for each in self.articulations]

    def _apply_joints(self, name: str) -> None:
        for articulation, row in zip(self.articulations, self._joints[name].cpu().numpy(), strict=True):
            setattr(articulation, name, row[: articulation.dof])

    gpu_apply_articulation_qpos = partialmethod(_apply_joints, "qpos")
    gpu_apply_articulation_qvel = partialmethod(_apply_joints, "qvel")
    gpu_apply_articulation_qf = partialmethod(_apply_joints, "qf")

    def _apply_targets(self, name: str, setter: str) -> None:
        for articulation, row in zip(self.articulations, self._joints[name].cpu().tolist(), strict=True):
            for joint, target in zip(articulation.active_joints, row, strict=False):
                getattr(joint, setter)(target)

    gpu_apply_articulation_target_position = partialmethod(_apply_targets, "target_qpos", "set_drive_target")
    gpu_apply_articulation_target_velocity = partialmethod(_apply_targets, "target_qvel", "set_drive_velocity_target")

    # -------------------------------------------------------------------------------------------------------- contacts
    def _scene_of(self, *bodies: object) -> int:
        return next(self._scenes_of[body] for body in bodies if body in self._scenes_of)

    def _query(self, keys: list) -> SimpleNamespace:
        table = self._contacts.create_query(keys)
        return SimpleNamespace(
            table=table, cuda_impulses=SimpleNamespace(torch=lambda: table.cuda_impulses.torch().to(self.device))
        )

    def _run_query(self, query: SimpleNamespace) -> None:
        self._contacts.run_query(query.table)


def _pose(body: physx.PhysxRigidBodyComponent) -> list[float]:
    return [*body.entity_pose.p, *body.entity_pose.q]


def _velocity(body: physx.PhysxRigidBodyComponent) -> list[float]:
    return [*body.linear_velocity, *body.angular_velocity]


def _joint_values(articulation: physx.PhysxArticulation, name: str) -> list[float]:
    if name in ("qpos", "qvel", "qf"):
        return getattr(articulation, name)
    drive = {"target_qpos": "drive_target", "target_qvel": "drive_velocity_target"}[name]
    return [float(np.squeeze(getattr(joint, drive))) for joint in articulation.active_joints]


class _Scene(BatchedScene):
    """ManiSkill's scene over this system; images are rendered scene by scene and handed out on the device."""

    def __init__(self, scenes: list[sapien.Scene], **kwargs: object) -> None:
        super().__init__(scenes, **kwargs)
        self.px = SimulatedPhysx(scenes, torch.device(self.device))

    def _setup_gpu_rendering(self) -> None:
        self.render_system_group = _Renderers(torch.device(self.device))


class _Renderers(RenderGroup):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create_camera_group(self, cameras: list, picture_names: list[str]) -> CameraGroup:
        group = super().create_camera_group(cameras, picture_names)
        read = group.get_picture_cuda

        def on_device(name: str) -> SimpleNamespace:
            images = read(name).torch().to(self._device)
            return SimpleNamespace(torch=lambda: images)

        group.get_picture_cuda = on_device
        return group


class _OnDevice:
    """Mixin in front of a stock task class: what asks for CUDA is answered by the stand-in."""

    _where: str

    @property
    def backend(self) -> BackendInfo:
        """A GPU's, on the device."""
        return self._backend

    @backend.setter
    def backend(self, cpu: BackendInfo) -> None:
        sim = SimpleNamespace(is_cuda=lambda: True)
        self._backend = replace(cpu, device=torch.device(self._where), sim_device=sim, sim_backend="physx_cuda")

    def _setup_scene(self) -> None:
        self._set_scene_config()
        scenes = make_scenes(self.num_envs, self._render_device)
        self.scene = _Scene(scenes, sim_config=self.sim_config, device=self.device, backend=self.backend)
        self.scene.px.timestep = 1.0 / self._sim_freq

    def _load_scene(self, options: dict) -> None:
        super()._load_scene(options)
        self.scene.px.number()
        self._give_numbers()

    def _after_reconfigure(self, options: dict) -> None:
        super()._after_reconfigure(options)
        self._give_numbers()
        for leaf in leaf_controllers(self.agent):
            if hasattr(leaf, "kinematics"):
                leaf._check_gpu_sim_works()
                leaf.kinematics._setup_gpu()

    def _give_numbers(self) -> None:
        """Tells bodies and articulations their rows, which SAPIEN's components know on a GPU (gpu_index)."""
        index = self.scene.px.index
        for struct in structs_of(self):
            if isinstance(struct, PhysxRigidBodyComponentStruct):
                rows = [index.get(body) for body in struct._bodies]
                struct._body_data_name = "cuda_rigid_body_data"
                if None not in rows:
                    struct._body_data_index_internal = torch.tensor(rows, device=self.device)
            elif isinstance(struct, Articulation | ArticulationJoint):
                objects = struct._objs if isinstance(struct, Articulation) else struct._physx_articulations
                numbers = [index[each] for each in objects]
                vars(struct)["_data_index"] = torch.tensor(numbers, device=self.device, dtype=torch.int32)


def gpu_task(task_id: str, num_rows: int, device: str, **kwargs: object) -> BaseEnv:
    """Returns a stock task with N rows on its GPU code path, with tensors on a device."""
    spec = REGISTERED_ENVS[task_id]
    cls = type(f"OnDevice{spec.cls.__name__}", (_OnDevice, spec.cls), {"_where": device})
    fixed = {"obs_mode": "none", "sim_backend": "physx_cpu", "render_backend": "cpu", "reconfiguration_freq": 0}
    return cls(**{**(spec.default_kwargs or {}), "num_envs": num_rows, **kwargs, **fixed})
