"""ManiSkill's scene object over N CPU scenes, and changes of the objects in it; classes and modules stay stock.

The rows of bodies, articulations and joints are written where ManiSkill itself keeps them on a GPU.  A few methods are
replaced in the objects, because they work differently on a CPU (visibility, camera matrices, inverse kinematics in
`controllers`) or because the replacement takes fewer operations (drive targets, grasping).
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, ModuleType

import numpy as np
import sapien
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.agents.robots import SO100, Fetch, Panda
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils import common
from mani_skill.utils.building.actor_builder import ActorBuilder
from mani_skill.utils.structs import Actor, Articulation, ArticulationJoint, Pose
from mani_skill.utils.structs.base import BaseStruct, PhysxRigidBodyComponentStruct
from mani_skill.utils.structs.render_camera import RenderCamera
from sapien import physx
from torch import Tensor

from envs.batched.physics import PhysicsBatch
from envs.batched.rendering import RenderGroup, set_visible
from envs.batched.shaders import STOCK, Pack, camera_shaders, current_pack, note_pack


def make_scenes(num_scenes: int, render_device: sapien.Device | None) -> list[sapien.Scene]:
    """Returns empty CPU scenes, each with its own PhysX system and, given a device, its own renderer."""
    scenes = []
    for _ in range(num_scenes):
        systems: list[sapien.System] = [physx.PhysxCpuSystem()]
        if render_device is not None:
            systems.append(sapien.render.RenderSystem(render_device))
        scenes.append(sapien.Scene(systems))
    return scenes


class BatchedScene(ManiSkillScene):
    """A ManiSkillScene whose physics is a `PhysicsBatch` and whose renderers are one per scene."""

    def __init__(self, sub_scenes: list[sapien.Scene], **kwargs: object) -> None:
        """Arguments are ManiSkillScene's."""
        super().__init__(sub_scenes, **kwargs)
        self.px = PhysicsBatch(sub_scenes, self.can_render())
        self.gpu_sim_enabled = True

    def create_actor_builder(self) -> ActorBuilder:
        """Returns a builder that gives every scene its ground plane (on a GPU the plane of scene 0 serves all)."""
        builder = super().create_actor_builder()
        builder.set_allow_overlapping_plane_collisions(True)
        return builder

    def add_camera(self, *args: object, **kwargs: object) -> RenderCamera:
        """Adds a camera with ManiSkillScene's arguments; one with ManiSkill's default shaders gets faster ones.

        The faster shaders draw colours only; a camera gets the others when more is requested.
        """
        stock = current_pack()  # ManiSkill has just set it for this camera
        if stock not in (STOCK, Pack.default):
            return self._add_as_on_cpu(*args, **kwargs)
        pack = Pack.colour if stock == STOCK else Pack.default
        with camera_shaders(self.sub_scenes[0], pack):
            camera = self._add_as_on_cpu(*args, **kwargs)
        note_pack(camera._render_cameras, pack)
        return camera

    def _add_as_on_cpu(self, *args: object, **kwargs: object) -> RenderCamera:
        """Adds a camera by ManiSkill's CPU path: the body that it is mounted on has no GPU index."""
        self.gpu_sim_enabled = False
        try:
            camera = super().add_camera(*args, **kwargs)
        finally:
            self.gpu_sim_enabled = True
        adopt_camera(camera)
        return camera

    def _setup_gpu_rendering(self) -> None:
        self.render_system_group = RenderGroup()


# By robot, of those whose assets ship with ManiSkill: fingers 1 and 2 open along their y axes (1) or against them (-1).
OPENING = {Panda: (1.0, -1.0), Fetch: (-1.0, 1.0), SO100: (1.0, -1.0)}


def is_grasping(
    opening: tuple[float, float],
    limits: tuple[float, float],
    robot: BaseAgent,
    object: Actor,
    min_force: float | None = None,
    max_angle: float | None = None,
) -> Tensor:
    """Returns whether each row's robot holds the object, bool [N].

    Args:
        opening: see OPENING.
        limits: the robot's defaults of min_force and max_angle.
        robot: the robot of all rows.
        object: the actor of all rows.
        min_force: of each finger on the object, in N.
        max_angle: between this force and the direction in which the finger opens, in degrees.
    """
    min_force = limits[0] if min_force is None else min_force
    max_angle = limits[1] if max_angle is None else max_angle
    fingers = robot.finger1_link, robot.finger2_link
    impulses = [robot.scene.get_pairwise_contact_impulses(finger, object) for finger in fingers]
    forces = torch.cat(impulses) / robot.scene.px.timestep
    pressing = (torch.linalg.norm(forces, axis=1) >= min_force).view(2, -1)
    holding = pressing[0] & pressing[1]
    if not holding.any():
        return holding
    poses = Pose(torch.cat([finger.pose.raw_pose for finger in fingers]))
    sides = poses.to_transformation_matrix()[..., :3, 1].reshape(2, -1, 3) * torch.tensor(opening)[:, None, None]
    angles = torch.rad2deg(common.compute_angle_between(sides.reshape(-1, 3), forces)).view(2, -1)
    facing = angles <= max_angle
    return holding & facing[0] & facing[1]


def structs_of(env: BaseEnv) -> list[BaseStruct]:
    """Returns the bodies, articulations, links and joints that can be reached from an env's attributes.

    They include those of ManiSkill's scene, and merged links, which only the task refers to.
    """
    structs, visited, waiting = [], {}, [env]
    while waiting:
        value = waiting.pop()
        if id(value) in visited or isinstance(value, type | ModuleType | FunctionType):
            continue
        visited[id(value)] = value  # holds a reference, so that no other object gets the same id
        if isinstance(value, BaseStruct) and value.scene is env.scene:
            structs.append(value)
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        else:
            waiting.extend(getattr(value, "__dict__", {}).values())
    return structs


def adopt_structs(env: BaseEnv) -> None:
    """Gives every struct of an env its rows, as numbered by `PhysicsBatch.number`."""
    for struct in structs_of(env):
        if isinstance(struct, PhysxRigidBodyComponentStruct):
            _adopt_bodies(struct)
        elif isinstance(struct, Articulation):
            _give_rows(struct, struct._objs)
            for name, target in (("set_joint_drive_targets", "qpos"), ("set_joint_drive_velocity_targets", "qvel")):
                setattr(struct, name, partial(_set_drive_targets, f"cuda_articulation_target_{target}", struct))
        elif isinstance(struct, ArticulationJoint):
            _give_rows(struct, struct._physx_articulations)


def _adopt_bodies(struct: PhysxRigidBodyComponentStruct) -> None:
    if isinstance(struct, Actor):
        struct.hide_visual = partial(_set_visible, struct, False)
        struct.show_visual = partial(_set_visible, struct, True)
    rows = [struct.px.body_row.get(body) for body in struct._bodies]
    if struct._body_data_index_internal is None and None not in rows:  # static bodies have none
        struct._body_data_name = "cuda_rigid_body_data"
        struct._body_data_index_internal = struct.px.row_sets.added(torch.tensor(rows))


def _give_rows(struct: Articulation | ArticulationJoint, articulations: list) -> None:
    if "_data_index" not in vars(struct):  # a cached property
        rows = torch.tensor([struct.px.articulation_row[each] for each in articulations], dtype=torch.int32)
        vars(struct)["_data_index"] = struct.px.row_sets.added(rows)


def _set_visible(actor: Actor, visible: bool) -> None:
    """Sets visibility only: `actor.hidden` stays False, since a hidden batched actor reports another pose."""
    for entity in actor._objs:
        set_visible(entity, visible)


def _set_drive_targets(
    name: str,
    articulation: Articulation,
    targets: Tensor | np.ndarray,
    joints: list[ArticulationJoint] | None = None,
    joint_indices: Tensor | None = None,
) -> None:
    """Assigns drive targets [N, J] of joints; during a partial reset, only those of its rows."""
    buffer = getattr(articulation.px, name)
    cells = buffer.row_sets.cells(buffer, *articulation.get_joint_target_indices(joints or joint_indices))
    mask = articulation.scene._reset_mask
    if not mask.all():
        cells = cells[mask[articulation._scene_idxs].numpy()]
    buffer.assign(cells, common.to_tensor(targets, device=articulation.device).detach().numpy())


def adopt_camera(camera: RenderCamera) -> None:
    """Gives a camera the matrices that SAPIEN computes, float32 [N, rows, columns].

    ManiSkill's batched formula differs in the last bits, and returns outdated matrices.
    """
    cameras = camera._render_cameras
    for name in ("get_extrinsic_matrix", "get_model_matrix"):
        matrices = lambda name=name: torch.from_numpy(np.stack([getattr(part, name)() for part in cameras]))  # noqa: E731
        setattr(camera, name, matrices)


def adopt_robots(agent: BaseAgent | None) -> None:
    """Gives robots the faster `is_grasping`."""
    for robot in agent.agents if isinstance(agent, MultiAgent) else [agent] if agent is not None else []:
        for cls, opening in OPENING.items():
            if type(robot).is_grasping is cls.is_grasping:
                robot.is_grasping = partial(is_grasping, opening, cls.is_grasping.__defaults__, robot)
