"""ManiSkill's scene object over N CPU scenes."""

from __future__ import annotations

import sapien
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils.building.actor_builder import ActorBuilder
from mani_skill.utils.structs.render_camera import RenderCamera
from sapien import physx

from envs.batched.adoption import adopt_camera
from envs.batched.physics import PhysicsBatch
from envs.batched.rendering import RenderGroup
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

    def __init__(self, sub_scenes: list[sapien.Scene], num_threads: int = 1, **kwargs: object) -> None:
        """Arguments are ManiSkillScene's, and in how many threads scenes are stepped."""
        super().__init__(sub_scenes, **kwargs)
        self.px = PhysicsBatch(sub_scenes, self.can_render(), num_threads)
        self.gpu_sim_enabled = True

    def create_actor_builder(self) -> ActorBuilder:
        """Returns a builder that gives every scene its ground plane (on a GPU the plane of scene 0 serves all)."""
        builder = super().create_actor_builder()
        builder.set_allow_overlapping_plane_collisions(True)
        return builder

    def add_camera(self, *args: object, **kwargs: object) -> RenderCamera:
        """Adds a camera with ManiSkillScene's arguments; one with ManiSkill's default shaders gets faster ones.

        They draw colours; a camera that is asked for more gets the others then.
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
        """Adds a camera where the body it is mounted on has no GPU index."""
        self.gpu_sim_enabled = False
        try:
            camera = super().add_camera(*args, **kwargs)
        finally:
            self.gpu_sim_enabled = True
        adopt_camera(camera)
        return camera

    def _setup_gpu_rendering(self) -> None:
        self.render_system_group = RenderGroup(self.sub_scenes)
