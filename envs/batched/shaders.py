"""The shaders of the cameras: SAPIEN's own, less what costs a CPU time and leaves no trace in the pictures.

Taken out, in scenes without an environment map, and the pictures stay the same bit for bit:

1. Reflections of the environment, black there: two look-ups per pixel, and a table (the BRDF's integral) that takes
   seven seconds to fill when the first picture of a process is taken.
2. In the colour pack, positions and segmentation, and with them a third of what is interpolated across triangles.
3. In the colour pack, the second pass, which blends with the background: black, so that only what is transparent
   differs.  The alpha of such pixels tells, see `shows_through`, and their camera needs the whole pack.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import sapien
from mani_skill.render.shaders import PREBUILT_SHADER_CONFIGS, set_shader_pack

from envs.batched.disk_cache import cached

logger = logging.getLogger(__name__)

STOCK = "minimal"  # ManiSkill's default: colour, depth and segmentation in one pass
_GEOMETRY = "PositionSegmentation"  # the picture that only the whole pack draws
_TABLE = "samplerBRDFLUT"
_DECLARATION = re.compile(rf"^layout\(set = \d+, binding = \d+\) uniform sampler2D {_TABLE};\n", re.MULTILINE)
_REFLECTIONS = re.compile(
    r"^vec3 (?:diffuse|specular)IBL\(.*?^}\n|^  vec3 wnormal = .*?(?=^  color \+= sceneBuffer\.ambientLight)",
    re.MULTILINE | re.DOTALL,
)
_GEOMETRY_OUTPUT = re.compile(rf"^(?:layout\(location = 1\) out ivec4 |  )out{_GEOMETRY}\b.*\n", re.MULTILINE)
_DRAW, _BLEND = "gbuffer.frag", "composite0.frag"


class Pack(StrEnum):
    """Shaders of a camera; the values of stock ones are ManiSkill's names."""

    colour = auto()  # "Color" alone, in one pass
    whole = auto()  # all pictures of ManiSkill's default pack
    default = auto()  # ManiSkill's pack "default", untouched


Camera = sapien.render.RenderCameraComponent
_packs: WeakKeyDictionary[Camera, Pack] = WeakKeyDictionary()  # a camera cannot be asked before its first picture


def _stock_folder() -> Path:
    return Path(sapien.__file__).parent / "vulkan_shader"


def _whole_pack() -> dict[str, str] | None:
    """Returns the changed files of the pack without reflections, None if they are not what this module knows."""
    draw, blend = ((_stock_folder() / STOCK / name).read_text() for name in (_DRAW, _BLEND))
    if len(_DECLARATION.findall(draw)) != 1 or len(_DECLARATION.findall(blend)) != 1:
        return None
    draw, found = _REFLECTIONS.subn("", _DECLARATION.sub("", draw))
    blend = _DECLARATION.sub("", blend)
    known = found == 3 and "IBL" not in draw and "wnormal" not in draw and _TABLE not in draw + blend
    return {_DRAW: draw, _BLEND: blend} if known else None


def _colour_pack() -> dict[str, str] | None:
    """Returns the changed files of the pack that draws colours only, in one pass."""
    whole = _whole_pack()
    if whole is None:
        return None
    draw, found = _GEOMETRY_OUTPUT.subn("", whole[_DRAW])
    known = found == 2 and _GEOMETRY not in draw and draw.count("outColorRaw") == 2
    return {_DRAW: draw.replace("outColorRaw", "outColor")} if known else None


@cache
def shader_folder(pack: Pack) -> str:
    """Returns the shader pack for scenes without an environment map: a folder, or the name of SAPIEN's own."""
    adapted = _colour_pack() if pack is Pack.colour else _whole_pack()
    if adapted is None:
        logger.warning("SAPIEN's shaders are not the known ones: pictures and each process's first one take longer")
        return STOCK
    digest = hashlib.blake2b("".join(adapted.values()).encode(), digest_size=8).hexdigest()

    def write(folder: Path) -> None:
        shutil.copytree(_stock_folder() / "common", folder / "common")
        shutil.copytree(_stock_folder() / STOCK, folder / STOCK)
        for name, text in adapted.items():
            (folder / STOCK / name).write_text(text)
        if pack is Pack.colour:
            for name in (_BLEND, "composite.vert"):
                (folder / STOCK / name).unlink()

    return str(cached(f"shaders/{sapien.__version__}-{digest}", write) / STOCK)


def current_pack() -> str:
    """Returns the name of the stock pack that cameras get now, "" if it is none of SAPIEN's."""
    folder = Path(sapien.render.get_camera_shader_dir())
    return folder.name if folder.parent in (Path(), _stock_folder()) else ""


def pack_of(camera: Camera) -> Pack:
    """Returns which shaders a camera gets when it is added to a scene; those that nobody noted: the whole pack."""
    return _packs.get(camera, Pack.whole)


def note_pack(cameras: Iterable[Camera], pack: Pack) -> None:
    """Remembers which shaders cameras were given."""
    for camera in cameras:
        _packs[camera] = pack


def give_shaders(camera: Camera, pack: Pack) -> None:
    """Gives a camera other shaders; the renderer has to step before its next picture."""
    entity = camera.entity
    with camera_shaders(entity.scene, pack):
        entity.remove_component(camera)
        entity.add_component(camera)
    note_pack([camera], pack)


def shows_through(pictures: np.ndarray) -> np.ndarray:
    """Returns which of the RGBA pictures, uint8 [n, height, width, 4], have transparent pixels; bool [n].

    A pixel has the alpha of what was drawn on it last, and 0 where nothing was.
    """
    return (pictures[..., 3] + np.uint8(1) > 1).any((1, 2))


@contextmanager
def camera_shaders(scene: sapien.Scene, pack: Pack) -> Iterator[None]:
    """Within it, cameras added to this scene get these shaders (a camera keeps those it was added with)."""
    before = sapien.render.get_camera_shader_dir()
    # ManiSkill's settings hold picture formats as well, which belong to the process and not to the pack.
    set_shader_pack(PREBUILT_SHADER_CONFIGS[Pack.default if pack is Pack.default else STOCK])
    if pack is not Pack.default and scene.render_system.cubemap is None:
        sapien.render.set_camera_shader_dir(shader_folder(pack))
    try:
        yield
    finally:
        sapien.render.set_camera_shader_dir(before)
