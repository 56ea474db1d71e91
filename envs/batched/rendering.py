"""Images of selected rows, with one renderer per scene; renders only images that are used.

            take_images          for EpisodeEnv: the rows that a policy observes
RenderGroup > CameraGroup          for ManiSkill: all rows
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import sapien
import torch
from torch import Tensor

from envs.batched.shaders import Pack, give_shaders, pack_of, shows_through

Camera = sapien.render.RenderCameraComponent
_open: dict[str, sapien.render.RenderSystem] = {}


def open_renderer(device: str) -> None:
    """Opens a renderer and keeps it: SAPIEN binds textures to the device of the first one.

    Raises:
        RuntimeError: no Vulkan device can render for this physics device ("cpu" or "cuda").
    """
    _open[device] = sapien.render.RenderSystem(sapien.Device(device))


def set_visible(entity: sapien.Entity, visible: bool) -> None:
    """Shows or hides an entity's visual bodies."""
    for component in entity.components:
        if isinstance(component, sapien.render.RenderBodyComponent):
            component.visibility = float(visible)


def take_images(scenes: Sequence[sapien.Scene], cameras: Sequence[Sequence[Camera]]) -> Tensor:
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
    rgb = colours([camera for row in cameras for camera in row])[..., :3]
    rgb = rgb if rgb.dtype == np.uint8 else (rgb * 255).astype(np.uint8)  # as ManiSkill converts
    return torch.from_numpy(np.ascontiguousarray(rgb).reshape(len(cameras), -1, *rgb.shape[1:]))


def colours(cameras: Sequence[Camera]) -> np.ndarray:
    """Returns the RGBA images that cameras have taken [n, height, width, 4]; retakes those with transparent pixels.

    They are uint8, or floats in [0, 1] from ManiSkill's shader pack "default".
    """
    images = np.stack([camera.get_picture("Color") for camera in cameras])
    if images.dtype != np.uint8:
        return images
    for i in shows_through(images).nonzero()[0].tolist():
        camera = cameras[i]
        if pack_of(camera) is Pack.colour:
            give_shaders(camera, Pack.whole)
            camera.entity.scene.render_system.step()
            camera.take_picture()
            images[i] = camera.get_picture("Color")
    return images


class RenderGroup:
    """Stands in for SAPIEN's RenderSystemGroup, for ManiSkill's own observations; training uses `take_images`."""

    def update_render(self) -> None:
        """Does nothing: scenes are rendered when their images are read."""

    def create_camera_group(self, cameras: Sequence[Camera], picture_names: Sequence[str]) -> CameraGroup:
        """Returns the cameras of all scenes as one; only images called "Color" can be read."""
        return CameraGroup(cameras)


class CameraGroup:
    """Stands in for SAPIEN's RenderCameraGroup: one camera per scene, images stacked."""

    def __init__(self, cameras: Sequence[Camera]) -> None:
        self._cameras = cameras

    def take_picture(self) -> None:
        """Does nothing: an observation may need no image, and SAPIEN crashes if a camera leaves its scene later."""

    def get_picture_cuda(self, name: str) -> SimpleNamespace:
        """Returns the images called `name` as a handle with .torch(), [N, height, width, channels]."""
        for camera in self._cameras:
            camera.entity.scene.render_system.step()
            camera.take_picture()
        images = torch.from_numpy(colours(self._cameras))
        return SimpleNamespace(torch=lambda: images)
