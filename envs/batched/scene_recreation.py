"""Recreates a CPU scene for each episode, which then depends on its seed only and not on PhysX's caches."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import sapien
from sapien import physx

from envs.batched.shaders import Pack, camera_shaders, pack_of


def recreated_scene(old: sapien.Scene, rendering: bool) -> sapien.Scene:
    """Moves the entities of a CPU scene into a new one: contact caches, warm starts and sleep counters are lost.

    Component objects stay valid; drive targets are zeroed, as those of a newly built articulation are.  Cameras keep
    their shaders.
    """
    physx.set_scene_config(old.physx_system.config)
    system = physx.PhysxCpuSystem()
    system.timestep = old.physx_system.timestep
    systems: list[sapien.System] = [system]
    if rendering:
        renderer = sapien.render.RenderSystem(old.render_system.device)
        renderer.ambient_light = old.render_system.ambient_light
        if old.render_system.cubemap is not None:
            renderer.cubemap = old.render_system.cubemap
        systems.append(renderer)
    new = sapien.Scene(systems)
    entities, packs = old.entities, _packs(old) if rendering else {}
    for entity in entities:
        old.remove_entity(entity)
    for entity in entities:
        with camera_shaders(new, packs[entity]) if entity in packs else nullcontext():
            new.add_entity(entity)
    for body in system.rigid_dynamic_components:
        if not body.kinematic:
            body.wake_up()  # a body keeps its sleep counter, which would change the last bits of later steps
    for link in system.articulation_link_components:
        if link.is_root:
            for joint in link.articulation.active_joints:
                joint.set_drive_target(0.0)
                joint.set_drive_velocity_target(0.0)
    return new


def _packs(scene: sapien.Scene) -> dict[sapien.Entity, Pack]:
    """Returns the entities that have cameras, each with the shaders of its most demanding camera."""
    packs: dict[sapien.Entity, Pack] = {}
    for camera in scene.render_system.cameras:
        pack = pack_of(camera)
        packs[camera.entity] = pack if packs.get(camera.entity, Pack.colour) is Pack.colour else packs[camera.entity]
    return packs


def packed_state(system: physx.PhysxCpuSystem) -> np.ndarray:
    """Returns the values of all bodies and joints, float32; see buffers.PackLayout for their order."""
    return np.frombuffer(system.pack(), np.float32)


def put_back(system: physx.PhysxCpuSystem, built: np.ndarray) -> None:
    """Restores the poses of bodies and joints from a packed state: a task need not place every body at a reset."""
    moved = packed_state(system) != built
    bodies = system.rigid_dynamic_components
    at = 13 * len(bodies)
    for k in moved[:at].reshape(-1, 13)[:, :7].any(1).nonzero()[0]:
        bodies[k].entity_pose = _pose(built[13 * k :])
    for root in (link for link in system.articulation_link_components if link.is_root):
        articulation, dof = root.articulation, root.articulation.dof
        if moved[at : at + 7].any():
            articulation.root_pose = _pose(built[at:])
        if moved[at + 13 : at + 13 + dof].any():
            articulation.qpos = built[at + 13 : at + 13 + dof]
        at += 13 + 4 * dof


def _pose(values: np.ndarray) -> sapien.Pose:
    return sapien.Pose(values[4:7], values[:4])
