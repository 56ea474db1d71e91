"""Images of chosen rows: one renderer per scene, and only images that are used.

            take_images          for EpisodeEnv: the rows that a policy observes
RenderGroup > CameraGroup          for ManiSkill: all rows; an unchanged scene keeps its image
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
    images = colours([camera for row in cameras for camera in row])
    return torch.from_numpy(_rgb(images).reshape(len(cameras), -1, *images.shape[1:3], 3))


def colours(cameras: Sequence[Camera]) -> np.ndarray:
    """Returns the RGBA images that cameras have taken [n, height, width, 4], retaken where something is transparent.

    Bytes, or floats in [0, 1] from ManiSkill's shader pack "default".
    """
    images = np.stack([camera.get_picture("Color") for camera in cameras])
    if images.dtype != np.uint8:
        return images
    for i in shows_through(images).nonzero()[0].tolist():
        images[i] = _image(cameras[i], "Color")
    return images


def _image(camera: Camera, name: str) -> np.ndarray:
    """Returns an image that the camera has taken, taken again if its shaders draw colours only."""
    if pack_of(camera) is Pack.colour:
        give_shaders(camera, Pack.whole)
        camera.entity.scene.render_system.step()
        camera.take_picture()
    return camera.get_picture(name)


def _rgb(images: np.ndarray) -> np.ndarray:
    """Returns RGBA images as contiguous uint8 RGB, converted as ManiSkill does."""
    rgb = images[..., :3]
    return np.ascontiguousarray(rgb if rgb.dtype == np.uint8 else (rgb * 255).astype(np.uint8))


class RenderGroup:
    """Stands in for SAPIEN's RenderSystemGroup, for ManiSkill's own observations: all scenes, one after the other.

    The appearance of a scene is given by its entities' poses, its cameras' poses on them, and its visible bodies.
    Colours and lights are set when an episode begins, which gives a row a new scene.
    """

    def __init__(self, scenes: Sequence[sapien.Scene]) -> None:
        """`scenes` is shared with the ManiSkillScene, which replaces its items."""
        self._scenes = scenes
        self._appearance: list[tuple | None] = [None] * len(scenes)
        self.versions = [0] * len(scenes)  # of the appearance of each scene

    def update_render(self) -> None:
        for row, scene in enumerate(self._scenes):
            appearance = _appearance_of(scene)
            if appearance != self._appearance[row]:
                scene.render_system.step()
                self._appearance[row] = appearance
                self.versions[row] += 1

    def create_camera_group(self, cameras: Sequence[Camera], picture_names: Sequence[str]) -> CameraGroup:
        """Returns the cameras of all scenes as one; `picture_names` is not needed."""
        return CameraGroup(cameras, self.versions)


def _appearance_of(scene: sapien.Scene) -> tuple:
    renderer = scene.render_system
    bodies = renderer.render_bodies
    return (
        scene,
        scene.pack_poses(),
        bodies,
        [body.visibility for body in bodies],
        [(camera, camera.local_pose.p.tobytes(), camera.local_pose.q.tobytes()) for camera in renderer.cameras],
    )


class CameraGroup:
    """Stands in for SAPIEN's RenderCameraGroup: one camera per scene, images stacked."""

    def __init__(self, cameras: Sequence[Camera], versions: Sequence[int]) -> None:
        """`cameras` has one camera per scene; `versions` is shared with the RenderGroup."""
        self._cameras, self._versions = cameras, versions
        self._taken = [-1] * len(cameras)  # version of the scene in each camera's last image
        self._images: dict[str, np.ndarray] = {}  # by name, [N, height, width, channels]
        self._read: dict[str, list[int]] = {}  # versions of these images

    def take_picture(self) -> None:
        """Does nothing: images are taken when they are read.

        An observation may need none of them, and SAPIEN crashes if a camera leaves its scene (for a new episode)
        before its image is complete.
        """

    def get_picture_cuda(self, name: str) -> SimpleNamespace:
        """Returns the images called `name` as a handle with .torch(), [N, height, width, channels].

        Only scenes whose appearance has changed since their last image are rendered.
        """
        read = self._read.setdefault(name, [-1] * len(self._cameras))
        rows = [row for row, version in enumerate(self._versions) if version != read[row]]
        for row in rows:
            if self._taken[row] != self._versions[row]:
                self._cameras[row].take_picture()
                self._taken[row] = self._versions[row]
        if rows:
            cameras = [self._cameras[row] for row in rows]
            fresh = colours(cameras) if name == "Color" else np.stack([_image(camera, name) for camera in cameras])
            if name not in self._images:
                self._images[name] = np.empty((len(self._cameras), *fresh.shape[1:]), fresh.dtype)
            self._images[name][rows] = fresh
            self._read[name] = list(self._versions)
        images = torch.from_numpy(self._images[name].copy())  # callers keep observations
        return SimpleNamespace(torch=lambda: images)
