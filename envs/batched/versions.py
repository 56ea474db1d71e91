"""Which ManiSkill and SAPIEN the batched route knows."""

from __future__ import annotations

from importlib.metadata import version

import sapien
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController, PDEEPoseController
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Actor, Articulation, ArticulationJoint
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct
from mani_skill.utils.structs.render_camera import RenderCamera

from rlinf_embodied.errors import SimulatorError

TESTED_VERSIONS = {"mani_skill": ("3.0.1",), "sapien": ("3.0.3",)}
_INTERNALS = (  # what the batched route relies on beside the public interface
    (BaseEnv, ("_set_main_rng", "_set_episode_rng", "_initialize_episode", "_reconfigure", "_setup_scene")),
    (BaseEnv, ("_step_action", "_before_control_step", "_after_control_step", "_set_scene_config", "_load_scene")),
    (BaseAgent, ("set_control_mode",)),
    (PDEEPosController, ("set_action", "compute_target_pose", "_preprocess_action", "set_drive_targets")),
    (PDEEPoseController, ("_clip_and_scale_action",)),
    (PhysxRigidBodyComponentStruct, ("_body_data_index", "_body_data_index_internal")),
    (Articulation, ("_data_index",)),
    (ArticulationJoint, ("_data_index",)),
    (Articulation, ("set_joint_drive_targets", "set_joint_drive_velocity_targets", "get_joint_target_indices")),
    (Actor, ("hide_visual", "show_visual")),
    (RenderCamera, ("get_extrinsic_matrix", "get_model_matrix")),
    (torch._C, ("_AutoDispatchBelowAutograd", "DisableTorchFunction", "_EnableTorchFunction")),
    (sapien.physx.PhysxCpuSystem, ("pack", "get_contacts")),
    (sapien.Scene, ("pack_poses", "add_entity", "remove_entity")),
)


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
