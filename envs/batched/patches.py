"""Every change to ManiSkill itself: inert for envs that are not batched, applied once per process.

1. `parse_sim_and_render_backend`, while a batched env is built: CPU tensors, yet several rows and a simulation device
   that says "cuda", because BaseEnv refuses N > 1 on the CPU and applies drive targets only where that is so.
2. The row numbers of bodies, articulations and joints: CPU components have no gpu index.
3. `PDEEPosController.set_action`: the CPU's inverse kinematics to a target pose, for N rows, instead of one batched
   Jacobian step, which gives other joint targets.
4. `Articulation.set_joint_drive_targets` and `set_joint_drive_velocity_targets`: where joints lie is looked up once.
5. `Actor.hide_visual` and `show_visual`: visibility as on the CPU, instead of moving the actor away.
6. Matrices of cameras: as SAPIEN computes them for each camera.
7. `is_grasping` of robots with two fingers: the same answer with fewer operations, see `grasping`.
8. Poses, rotations, angles and actions of a few rows in NumPy: the same numbers sooner, see `rotations`.  This one
   serves stock envs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import sapien
import torch
from mani_skill.agents.controllers import pd_ee_pose
from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController, PDEEPoseController
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.envs import sapien_env
from mani_skill.envs.utils.randomization import pose as randomized
from mani_skill.utils import common, gym_utils
from mani_skill.utils.geometry import rotation_conversions
from mani_skill.utils.structs import Actor, Articulation, ArticulationJoint, Pose
from mani_skill.utils.structs import pose as pose_module
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct
from mani_skill.utils.structs.render_camera import RenderCamera
from torch import Tensor

from envs.batched import rotations
from envs.batched.grasping import OPENING, is_grasping
from envs.batched.kinematics import RowSolver
from envs.batched.rendering import set_visible
from envs.batched.scene import BatchedScene
from rlinf_embodied.errors import SimulatorError

TESTED_VERSIONS = {"mani_skill": ("3.0.1",), "sapien": ("3.0.3",)}
_INTERNALS = (  # what the batched route relies on beside the public interface
    (sapien_env.BaseEnv, ("_set_main_rng", "_set_episode_rng", "_initialize_episode", "_reconfigure", "_setup_scene")),
    (sapien_env.BaseEnv, ("_step_action", "_before_control_step", "_after_control_step", "_set_scene_config")),
    (PDEEPosController, ("set_action", "compute_target_pose", "_preprocess_action", "set_drive_targets")),
    (PhysxRigidBodyComponentStruct, ("_body_data_index",)),
    (Articulation, ("_data_index",)),
    (ArticulationJoint, ("_data_index",)),
    (Articulation, ("set_joint_drive_targets", "set_joint_drive_velocity_targets", "get_joint_target_indices")),
    (Actor, ("hide_visual", "show_visual")),
    (RenderCamera, ("get_extrinsic_matrix", "get_model_matrix")),
    (torch._C, ("_AutoDispatchBelowAutograd", "DisableTorchFunction")),
    (sapien.physx.PhysxCpuSystem, ("pack", "get_contacts")),
    (sapien.Scene, ("pack_poses", "add_entity", "remove_entity")),
)
_FASTER = (
    (rotation_conversions, "quaternion_raw_multiply", rotations.quaternion_product),
    (pd_ee_pose, "quaternion_multiply", rotations.quaternion_multiply),  # imported by name, as are others here
    (pd_ee_pose, "euler_angles_to_matrix", rotations.euler_angles_to_matrix),
    (randomized, "euler_angles_to_matrix", rotations.euler_angles_to_matrix),
    (randomized, "matrix_to_quaternion", rotations.matrix_to_quaternion),
    (rotation_conversions, "matrix_to_quaternion", rotations.matrix_to_quaternion),
    (pd_ee_pose, "matrix_to_quaternion", rotations.matrix_to_quaternion),
    (pose_module, "quaternion_to_matrix", rotations.quaternion_to_matrix),
    (Pose, "inv", rotations.inverse),
    (Pose, "__mul__", rotations.pose_product),
    (Pose, "to_transformation_matrix", rotations.to_transformation_matrix),
    (common, "compute_angle_between", rotations.compute_angle_between),
    (gym_utils, "clip_and_scale_action", rotations.clip_and_scale_action),
)
_patched = "_rlinf_embodied_patched"
_row_solver = "_rlinf_embodied_row_solver"


def check_versions() -> None:
    """Checks that ManiSkill and SAPIEN are as the batched route expects them.

    Raises:
        SimulatorError: another version, or an internal that is used here is gone.
    """
    for package, tested in TESTED_VERSIONS.items():
        found = version(package)
        if found not in tested:
            raise SimulatorError(
                f"{package} {found} is installed, but the batched CPU backend was tested with {package} "
                f"{' and '.join(tested)} only: install `{package}=={tested[-1]}`, or use stock envs (env.backend=stock)"
            )
    for owner, names in _INTERNALS:
        for name in names:
            if not hasattr(owner, name):
                raise SimulatorError(
                    f"{owner.__name__}.{name} is missing, but the batched CPU backend needs it: install the pinned "
                    "versions of mani_skill and sapien (constraints.txt), or use env.backend=stock"
                )


@contextmanager
def batched_backend() -> Iterator[None]:
    """Within it, ManiSkill envs are built with N CPU rows."""
    stock = sapien_env.parse_sim_and_render_backend

    def parse(sim_backend: str, render_backend: str) -> SimpleNamespace:
        info = stock("physx_cpu", render_backend)
        info.sim_backend = "physx_cpu_batched"
        info.sim_device = SimpleNamespace(is_cuda=lambda: True)
        return info

    sapien_env.parse_sim_and_render_backend = parse
    try:
        yield
    finally:
        sapien_env.parse_sim_and_render_backend = stock


def patch_maniskill() -> None:
    """Applies the changes, once per process; a second call does nothing."""
    if getattr(PDEEPosController, _patched, False):
        return
    setattr(PDEEPosController, _patched, True)
    _patch_index(PhysxRigidBodyComponentStruct, "_body_data_index", _body_rows, torch.int64)
    _patch_index(Articulation, "_data_index", lambda s: [s.px.articulation_row[a] for a in s._objs], torch.int32)
    _patch_index(ArticulationJoint, "_data_index", _joint_rows, torch.int32)
    _patch_method(PDEEPosController, "set_action", _set_ee_action)
    for name, target in (("set_joint_drive_targets", "qpos"), ("set_joint_drive_velocity_targets", "qvel")):
        _patch_method(Articulation, name, partial(_set_drive_targets, f"cuda_articulation_target_{target}"))
    _patch_method(PDEEPoseController, "_clip_and_scale_action", _scale_pose_action)
    for robot, opening in OPENING.items():
        _patch_method(robot, "is_grasping", partial(is_grasping, opening, robot.is_grasping.__defaults__))
    for name in ("get_extrinsic_matrix", "get_model_matrix"):
        _patch_method(RenderCamera, name, partial(_camera_matrices, name))
    _patch_method(Actor, "hide_visual", lambda actor: _set_visible(actor, False))
    _patch_method(Actor, "show_visual", lambda actor: _set_visible(actor, True))
    for module, name, fast in _FASTER:
        setattr(module, name, rotations.with_fallback(getattr(module, name), fast))


@contextmanager
def stock_rotations() -> Iterator[None]:
    """Within it, rotations are computed by ManiSkill's own functions."""
    ours = [(module, name, getattr(module, name)) for module, name, _ in _FASTER]
    for module, name, function in ours:
        setattr(module, name, getattr(function, "__wrapped__", function))
    try:
        yield
    finally:
        for module, name, function in ours:
            setattr(module, name, function)


def _is_batched(struct: object) -> bool:
    return isinstance(struct.scene, BatchedScene)


def _patch_index(cls: type, name: str, rows: Callable[[object], list[int]], dtype: torch.dtype) -> None:
    stock = cls.__dict__[name].func

    def index(self: object) -> Tensor:
        if not _is_batched(self):
            return stock(self)
        numbers = torch.tensor(rows(self), dtype=dtype)
        self.px.row_sets.add(numbers)
        return numbers

    prop = cached_property(index)
    prop.__set_name__(cls, name)
    setattr(cls, name, prop)


def _patch_method(cls: type, name: str, batched: Callable) -> None:
    stock = getattr(cls, name)

    @wraps(stock)
    def method(self: object, *args: object, **kwargs: object) -> object:
        return (batched if _is_batched(self) else stock)(self, *args, **kwargs)

    setattr(cls, name, method)


def _body_rows(struct: PhysxRigidBodyComponentStruct) -> list[int]:
    return [struct.px.body_row[body] for body in struct._bodies]


def _joint_rows(joint: ArticulationJoint) -> list[int]:
    return [joint.px.articulation_row[articulation] for articulation in joint._physx_articulations]


def _camera_matrices(name: str, camera: RenderCamera) -> Tensor:
    """Returns float32 [N, rows, columns]; ManiSkill's batched formula has other last bits, and keeps old matrices."""
    return torch.from_numpy(np.stack([getattr(part, name)() for part in camera._render_cameras]))


def _set_visible(actor: Actor, visible: bool) -> None:
    """Sets visibility only: `actor.hidden` stays False, as a batched actor that is hidden reports another pose."""
    for entity in actor._objs:
        set_visible(entity, visible)


def _set_drive_targets(
    name: str,
    articulation: Articulation,
    targets: Tensor | np.ndarray,
    joints: list[ArticulationJoint] | None = None,
    joint_indices: Tensor | None = None,
) -> None:
    """Assigns drive targets [N, J] of joints, those of the rows that are reset where some are."""
    buffer = getattr(articulation.px, name)
    cells = buffer.row_sets.cells(buffer, *articulation.get_joint_target_indices(joints or joint_indices))
    mask = articulation.scene._reset_mask
    if not mask.all():
        cells = cells[mask[articulation._scene_idxs].numpy()]
    buffer.assign(cells, common.to_tensor(targets, device=articulation.device).detach().numpy())


def _set_ee_action(controller: PDEEPosController, action: Tensor) -> None:
    """Sets drive targets from end-effector actions [N, A] as ManiSkill's CPU path does, for the active rows."""
    action = controller._preprocess_action(action)
    controller._step = 0
    controller._start_qpos = controller.qpos
    previous = controller._target_pose if controller.config.use_target else controller.ee_pose_at_base
    controller._target_pose = controller.compute_target_pose(previous, action)
    controller._target_qpos = _solve(controller)
    if controller.config.interpolate:
        controller._step_size = (controller._target_qpos - controller._start_qpos) / controller._sim_steps
    else:
        controller.set_drive_targets(controller._target_qpos)


def _scale_pose_action(controller: PDEEPoseController, action: Tensor) -> Tensor:
    """Returns actions [N, 6] in the controller's range."""
    low, high = controller.action_space_low, controller.action_space_high
    return rotations.scale_pose_action(controller.config.rot_lower, action.detach(), low, high)


def row_solver(kinematics: Kinematics) -> RowSolver:
    """Returns the solver of a controller's kinematics, made when it is first asked for."""
    if not hasattr(kinematics, _row_solver):
        setattr(kinematics, _row_solver, RowSolver(kinematics))
    return getattr(kinematics, _row_solver)


def _solve(controller: PDEEPosController) -> Tensor:
    """Returns joint targets [N, joints] for the target poses; a row without solution, or at rest, stays where it is."""
    targets = controller._start_qpos.numpy().copy()
    qpos, poses = controller.articulation.get_qpos().numpy(), controller._target_pose.raw_pose.numpy()
    row_solver(controller.kinematics).solve(controller.scene.px.active, qpos, poses, targets)
    return torch.from_numpy(targets)
