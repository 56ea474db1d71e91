"""A CPU scene without a past: what an episode may depend on is its seed, not what PhysX cached before it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import sapien
from sapien import physx

from envs.batched.shaders import camera_shaders


def renewed(old: sapien.Scene, rendering: bool) -> sapien.Scene:
    """Moves the entities of a CPU scene into a new one: contact caches, warm starts and sleep counters start afresh.

    Component objects stay valid; drive targets are zeroed, as those of a newly built articulation are.  Cameras take
    their shaders anew, see `shaders.camera_shaders`.
    """
    physx.set_scene_config(old.physx_system.config)
    system = physx.PhysxCpuSystem()
    system.timestep = old.physx_system.timestep
    systems = [system, _renewed_renderer(old.render_system)] if rendering else [system]
    new = sapien.Scene(systems)
    entities = old.entities
    for entity in entities:
        old.remove_entity(entity)
    with camera_shaders(new) if rendering else nullcontext():
        for entity in entities:
            new.add_entity(entity)
    for body in system.rigid_dynamic_components:
        if not body.kinematic:
            body.wake_up()  # a body takes its count of quiet steps along, and a later sleep has other last bits
    for link in system.articulation_link_components:
        if link.is_root:
            for joint in link.articulation.active_joints:
                joint.set_drive_target(0.0)
                joint.set_drive_velocity_target(0.0)
    return new


def _renewed_renderer(old: sapien.render.RenderSystem) -> sapien.render.RenderSystem:
    new = sapien.render.RenderSystem(old.device)
    new.ambient_light = old.ambient_light
    if old.cubemap is not None:
        new.cubemap = old.cubemap
    return new


def body_poses(system: physx.PhysxCpuSystem) -> np.ndarray:
    """Returns quaternion and position of each dynamic or kinematic body, float32 [bodies, 7]; see layout.py."""
    num_bodies = len(system.rigid_dynamic_components)
    return np.frombuffer(system.pack(), np.float32, 13 * num_bodies).reshape(num_bodies, 13)[:, :7].copy()


def put_back(system: physx.PhysxCpuSystem, poses: np.ndarray) -> None:
    """Moves bodies to these poses [bodies, 7]; a task does not place in a reset what it never places, only moves."""
    for k in (body_poses(system) != poses).any(1).nonzero()[0]:
        system.rigid_dynamic_components[k].entity_pose = sapien.Pose(poses[k, 4:], poses[k, :4])
