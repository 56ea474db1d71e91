"""The shaders of the cameras: SAPIEN's own, less what costs a CPU time and leaves no trace in the images.

Which lines are left out is declared in shader_packs.py.  In scenes without an environment map the images stay the
same bit for bit without

1. reflections of the environment, black there: two look-ups per pixel, and a table (the BRDF's integral) that takes
   seven seconds to fill when the first image of a process is taken;
2. in the colour pack, positions and segmentation, and with them a third of what is interpolated across triangles;
3. in the colour pack, the second pass, which blends with the background: black, so that only what is transparent
   differs.  The alpha of such pixels tells, see `shows_through`, and their camera needs the whole pack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import sapien
from mani_skill.render.shaders import PREBUILT_SHADER_CONFIGS, set_shader_pack

from envs.batched.shader_packs import STOCK_FOLDER, made_packs, unknown_files

logger = logging.getLogger(__name__)

STOCK = "minimal"  # ManiSkill's default: colour, depth and segmentation in one pass


class Pack(StrEnum):
    """Shaders of a camera; the values of stock ones are ManiSkill's names."""

    colour = auto()  # "Color" alone, in one pass
    whole = auto()  # all images of ManiSkill's default pack
    default = auto()  # ManiSkill's pack "default", untouched


Camera = sapien.render.RenderCameraComponent
_packs: WeakKeyDictionary[Camera, Pack] = WeakKeyDictionary()  # a camera cannot be asked before its first image


@cache
def shader_folder(pack: Pack) -> str:
    """Returns the shader pack for scenes without an environment map: a folder, or the name of SAPIEN's own."""
    if others := unknown_files():
        logger.warning(
            "sapien %s has other shaders than the faster ones are made from (%s): each image and a process's first "
            "one take longer",
            sapien.__version__,
            ", ".join(others),
        )
        return STOCK
    return str(made_packs() / pack)


def current_pack() -> str:
    """Returns the name of the stock pack that cameras get now, "" if it is none of SAPIEN's."""
    folder = Path(sapien.render.get_camera_shader_dir())
    known = folder.parent == Path() or folder.parent.resolve() == STOCK_FOLDER.resolve()  # an environment may be a link
    return folder.name if known else ""


def pack_of(camera: Camera) -> Pack:
    """Returns which shaders a camera gets when it is added to a scene; those that nobody noted: the whole pack."""
    return _packs.get(camera, Pack.whole)


def note_pack(cameras: Iterable[Camera], pack: Pack) -> None:
    """Remembers which shaders cameras were given."""
    for camera in cameras:
        _packs[camera] = pack


def give_shaders(camera: Camera, pack: Pack) -> None:
    """Gives a camera other shaders; the renderer has to step before its next image."""
    entity = camera.entity
    with camera_shaders(entity.scene, pack):
        entity.remove_component(camera)
        entity.add_component(camera)
    note_pack([camera], pack)


def shows_through(images: np.ndarray) -> np.ndarray:
    """Returns which of the RGBA images, uint8 [n, height, width, 4], have transparent pixels; bool [n].

    A pixel has the alpha of what was drawn on it last, and 0 where nothing was.
    """
    return (images[..., 3] + np.uint8(1) > 1).any((1, 2))


@contextmanager
def camera_shaders(scene: sapien.Scene, pack: Pack) -> Iterator[None]:
    """Within it, cameras added to this scene get these shaders (a camera keeps those it was added with)."""
    before = sapien.render.get_camera_shader_dir()
    # ManiSkill's settings hold image formats as well, which belong to the process and not to the pack.
    set_shader_pack(PREBUILT_SHADER_CONFIGS[Pack.default if pack is Pack.default else STOCK])
    if pack is not Pack.default and scene.render_system.cubemap is None:
        sapien.render.set_camera_shader_dir(shader_folder(pack))
    try:
        yield
    finally:
        sapien.render.set_camera_shader_dir(before)
