"""What env.perturb changes in the images of a ManiSkill scene: camera poses, light, and the colours of table and floor.

All scenes are changed once, when they are built, and in the same way.  The cameras of videos are not moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sapien
from mani_skill.envs.sapien_env import BaseEnv
from sapien.render import RenderBodyComponent, RenderMaterial, RenderShapeTriangleMesh

from rlinf_embodied.config import PerturbConfig
from rlinf_embodied.randomness import normal, uniform

AXES = ("camera", "camera_turn", "light", "texture")


def perturb_scenes(task: BaseEnv, cameras: Sequence[str], perturb: PerturbConfig) -> None:
    """Changes all scenes of a task; `cameras` are the names of the policy's cameras."""
    if perturb.camera or perturb.camera_turn:
        for number, name in enumerate(cameras):
            displacement = _displacement(perturb, number)
            for camera in task._sensors[name].camera._render_cameras:
                camera.local_pose = camera.local_pose * displacement
    for scene in task.scene.sub_scenes if perturb.light else ():
        _relight(scene, perturb)
    if perturb.texture:
        goal_free = [a for a in task.scene.actors.values() if a.px_body_type != "dynamic" and "goal" not in a.name]
        for number, actor in enumerate(goal_free):
            for entity in actor._objs:
                _repaint(entity, uniform(perturb.seed, "perturb texture", number, shape=(3,)))


def _displacement(perturb: PerturbConfig, camera: int) -> sapien.Pose:
    """Returns a displacement in the camera's frame: distance and angle from `perturb`, direction and axis at random."""
    direction, axis = (
        _unit(normal(perturb.seed, f"perturb camera {what}", camera, shape=(3,))) for what in ("way", "axis")
    )
    half = np.deg2rad(perturb.camera_turn) / 2
    return sapien.Pose(direction * perturb.camera, [np.cos(half), *(axis * np.sin(half))])


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def _relight(scene: sapien.Scene, perturb: PerturbConfig) -> None:
    """Makes each light, and each of its colours, brighter or darker by the share `perturb.light`."""
    signs = np.sign(uniform(perturb.seed, "perturb light", np.arange(8), shape=(3,)) - 0.5)
    factors = 1 + perturb.light * signs
    scene.render_system.ambient_light = scene.render_system.ambient_light * factors[0]
    for number, light in enumerate(scene.render_system.lights):
        light.color = light.color * factors[1 + number % 7]


def _repaint(entity: sapien.Entity, colour: np.ndarray) -> None:
    """Gives the meshes of an entity one colour instead of their textures.

    The meshes are copied, since materials are shared with other scenes of the process.
    """
    for old in [part for part in entity.components if isinstance(part, RenderBodyComponent)]:
        if not all(isinstance(shape, RenderShapeTriangleMesh) for shape in old.render_shapes):
            continue
        new = RenderBodyComponent()
        for shape in old.render_shapes:
            for part in shape.parts:
                material = RenderMaterial(base_color=[*colour, 1.0], roughness=0.9)
                arrays = part.vertices, part.triangles, part.get_vertex_normal(), part.get_vertex_uv()
                copy = RenderShapeTriangleMesh(*arrays, material)
                copy.scale, copy.local_pose = shape.scale, shape.local_pose
                new.attach(copy)
        new.visibility = old.visibility
        entity.remove_component(old)
        entity.add_component(new)
