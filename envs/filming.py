"""Images of single rows for videos: larger, with the original meshes, and with goal markers."""

from __future__ import annotations

from collections.abc import Sequence

import sapien
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils.structs import Link
from torch import Tensor

from envs.batched.decimate import Swap
from envs.batched.rendering import set_visible, take_images
from envs.batched.shaders import Pack, camera_shaders, note_pack
from rlinf_embodied.errors import SimulatorError


class Film:
    """One film camera per filmed row, made when it is first used; nothing here touches the physics."""

    def __init__(
        self, tasks: Sequence[BaseEnv], swaps: Sequence[Sequence[Swap]], hidden: Sequence[Sequence[sapien.Entity]]
    ) -> None:
        """Takes one task with all rows or one task per row, and each row's decimated visuals and hidden entities."""
        self._tasks, self._swaps, self._hidden = tasks, swaps, hidden
        self._cameras: dict[tuple[int, int], sapien.render.RenderCameraComponent] = {}

    def image(self, scene: sapien.Scene, row: int, size: int) -> Tensor:
        """Renders one row's scene with its original visuals, uint8 [size, size, 3]."""
        camera = self._camera(scene, row, size)
        for swap in self._swaps[row]:
            swap.show_heavy()
        for entity in self._hidden[row]:
            set_visible(entity, True)
        try:
            return take_images([scene], [[camera]])[0, 0]
        finally:
            for entity in self._hidden[row]:
                set_visible(entity, False)
            for swap in self._swaps[row]:
                swap.show_light()

    def _camera(self, scene: sapien.Scene, row: int, size: int) -> sapien.render.RenderCameraComponent:
        """Returns the row's camera; its entity moves on with the others when the scene is recreated."""
        if (row, size) not in self._cameras:
            task, at = (self._tasks[0], row) if len(self._tasks) == 1 else (self._tasks[row], 0)
            config = _film_config(task)
            camera = sapien.render.RenderCameraComponent(size, size)
            camera.set_fovy(float(config.fov), compute_x=True)
            camera.near, camera.far = float(config.near), float(config.far)
            camera.local_pose = config.pose.sp
            with camera_shaders(scene, Pack.colour):
                if config.mount is None:
                    entity = sapien.Entity()
                    entity.add_component(camera)
                    scene.add_entity(entity)
                else:
                    body = config.mount._objs[at]
                    (body.entity if isinstance(config.mount, Link) else body).add_component(camera)
            note_pack([camera], Pack.colour)
            self._cameras[row, size] = camera
        return self._cameras[row, size]


def _film_config(task: BaseEnv) -> CameraConfig:
    """Returns the task's camera for people, or else its first sensor."""
    configs = [*task._human_render_camera_configs.values(), *task._sensor_configs.values()]
    for config in configs:
        if config.fov is not None and (config.mount is not None or config.entity_uid is None):
            return config
    raise SimulatorError(
        f"{type(task).__name__} has no camera to film with: use eval.record_video=false, or give the task one"
    )
