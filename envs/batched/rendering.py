"""Pictures of chosen rows: one renderer per scene, nothing rendered for rows that nobody will look at."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import sapien
import torch
from torch import Tensor


def set_visible(entity: sapien.Entity, visible: bool) -> None:
    """Shows or hides an entity's visual bodies."""
    for component in entity.components:
        if isinstance(component, sapien.render.RenderBodyComponent):
            component.visibility = float(visible)


def take_pictures(
    scenes: Sequence[sapien.Scene], cameras: Sequence[Sequence[sapien.render.RenderCameraComponent]]
) -> Tensor:
    """Renders these scenes.

    Args:
        scenes: R CPU scenes, each with its own renderer.
        cameras: K cameras of equal size for each of the R scenes.

    Returns:
        uint8 [R, K, height, width, 3].
    """
    for scene, row in zip(scenes, cameras, strict=True):
        scene.render_system.step()
        for camera in row:
            camera.take_picture()
    pictures = [[_rgb(camera.get_picture("Color")) for camera in row] for row in cameras]
    return torch.from_numpy(np.stack([np.stack(row) for row in pictures]))


def _rgb(color: np.ndarray) -> np.ndarray:
    """Converts SAPIEN's picture, float RGBA in [0, 1] or bytes by shader, to uint8 RGB as ManiSkill does."""
    rgb = color[..., :3]
    return rgb if rgb.dtype == np.uint8 else (rgb * 255).astype(np.uint8)


class RenderGroup:
    """Plays SAPIEN's RenderSystemGroup for ManiSkill's own observations: all scenes, one after the other."""

    def __init__(self, scenes: Sequence[sapien.Scene]) -> None:
        """`scenes` is shared with the ManiSkillScene."""
        self._scenes = scenes

    def update_render(self) -> None:
        """Brings the renderers up to date with the physics."""
        for scene in self._scenes:
            scene.render_system.step()

    def create_camera_group(
        self, cameras: Sequence[sapien.render.RenderCameraComponent], picture_names: Sequence[str]
    ) -> CameraGroup:
        """Returns the cameras of all scenes as one."""
        return CameraGroup(cameras)


class CameraGroup:
    """Plays SAPIEN's RenderCameraGroup: one camera per scene, pictures stacked."""

    def __init__(self, cameras: Sequence[sapien.render.RenderCameraComponent]) -> None:
        """`cameras` has one camera per scene."""
        self._cameras = cameras
        self._asked = False

    def take_picture(self) -> None:
        """Has all cameras rendered when their pictures are read.

        An observation may need none of their pictures, and SAPIEN crashes when a camera leaves its scene (as for a new
        episode) before its picture was waited for.
        """
        self._asked = True

    def get_picture_cuda(self, name: str) -> SimpleNamespace:
        """Returns the pictures called `name` as a handle with .torch(), [N, height, width, channels]."""
        if self._asked:
            for camera in self._cameras:
                camera.take_picture()
            self._asked = False
        pictures = torch.from_numpy(np.stack([camera.get_picture(name) for camera in self._cameras]))
        return SimpleNamespace(torch=lambda: pictures)
