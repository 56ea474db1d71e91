"""Pictures of single rows for videos: larger, with the original meshes, and with goal markers."""

from __future__ import annotations

from collections.abc import Sequence

import sapien
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from torch import Tensor

from envs.batched.decimate import Swap
from envs.batched.rendering import set_visible, take_pictures
from envs.batched.shaders import camera_shaders
from rlinf_embodied.errors import SimulatorError


class Film:
    """One film camera per filmed row, made when it is first used; nothing here touches the physics."""

    def __init__(
        self, task: BaseEnv, swaps: Sequence[Sequence[Swap]], hidden: Sequence[Sequence[sapien.Entity]]
    ) -> None:
        """`swaps` and `hidden` hold, by row, the decimated visuals and the entities that policies must not see."""
        self._config = _film_config(task)
        self._swaps, self._hidden = swaps, hidden
        self._cameras: dict[tuple[int, int], sapien.render.RenderCameraComponent] = {}

    def picture(self, scene: sapien.Scene, row: int, size: int) -> Tensor:
        """Renders one row's scene with its original visuals, uint8 [size, size, 3]."""
        camera = self._camera(scene, row, size)
        for swap in self._swaps[row]:
            swap.show_heavy()
        for entity in self._hidden[row]:
            set_visible(entity, True)
        try:
            return take_pictures([scene], [[camera]])[0, 0]
        finally:
            for entity in self._hidden[row]:
                set_visible(entity, False)
            for swap in self._swaps[row]:
                swap.show_light()

    def _camera(self, scene: sapien.Scene, row: int, size: int) -> sapien.render.RenderCameraComponent:
        """Returns the row's camera; its entity stays in the scene and moves on with the others when that is renewed."""
        if (row, size) not in self._cameras:
            camera = sapien.render.RenderCameraComponent(size, size)
            camera.set_fovy(float(self._config.fov), compute_x=True)
            camera.near, camera.far = float(self._config.near), float(self._config.far)
            entity = sapien.Entity()
            entity.name = f"film_camera_{row}_{size}"
            entity.add_component(camera)
            with camera_shaders(scene):
                scene.add_entity(entity)
            entity.pose = self._config.pose.sp
            self._cameras[row, size] = camera
        return self._cameras[row, size]


def _film_config(task: BaseEnv) -> CameraConfig:
    """Returns the task's camera for people, or else its first fixed sensor."""
    configs = [*task._human_render_camera_configs.values(), *task._sensor_configs.values()]
    for config in configs:
        if config.mount is None and config.entity_uid is None and config.fov is not None:
            return config
    raise SimulatorError(
        f"{type(task).__name__} has no fixed camera to film with: use eval.record_video=false, or give it one"
    )
