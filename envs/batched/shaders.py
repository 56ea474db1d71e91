"""The shaders of the cameras: SAPIEN's, without the parts that cost CPU time and do not change the images.

The removed lines are declared below.  In scenes without an environment map, images are bit for bit the same without

1. reflections of the environment, black there: two look-ups per pixel, and a table (the BRDF's integral) that takes
   seven seconds to fill when the first image of a process is taken;
2. in the colour pack, positions and segmentation, and with them a third of the values interpolated across triangles;
3. in the colour pack, the second pass, which blends with the background: black, so that only transparent pixels
   differ.  Their alpha identifies them, see `shows_through`, and their camera needs the whole pack.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import sapien
from mani_skill.render.shaders import PREBUILT_SHADER_CONFIGS, set_shader_pack

from rlinf_embodied.cache import cache_root, cached

STOCK_FOLDER = Path(sapien.__file__).parent / "vulkan_shader"
KNOWN_FILES = {  # blake2b digests of the files that the line numbers below refer to
    "common/lights.glsl": "dc2a40e2c9a21134da4f6f4c20d06415",
    "common/shadow.glsl": "b54213f73790ccd25e1f57db3940c88e",
    "common/view.glsl": "6b8319d9e277c2b0cbc4da42b4edf708",
    "minimal/composite.vert": "beec0d63f308d4f7be0c11f8776fe8c2",
    "minimal/composite0.frag": "6941b318224ca693ddef00796b124b94",
    "minimal/gbuffer.frag": "b4022d945dff569a6be00c8e6af5290d",
    "minimal/gbuffer.vert": "670089d17dacb5d43e5d1fb20ab1779a",
    "minimal/shadow.vert": "78c99a90414aad4e129789b927c877dd",
}


_REFLECTIONS = ((100, 100), (111, 115), (117, 124), (320, 324))  # the table, two functions, their calls
CUT = {  # first and last line, from 1, of each part that is taken out
    "whole/gbuffer.frag": _REFLECTIONS,
    "whole/composite0.frag": ((71, 71),),  # the table again
    "colour/gbuffer.frag": (*_REFLECTIONS, (133, 133), (328, 328)),
}
RENAMED = {"colour/gbuffer.frag": {132: ("outColorRaw", "outColor"), 327: ("outColorRaw", "outColor")}}
LEFT_OUT = ("colour/composite0.frag", "colour/composite.vert")


def unknown_files() -> list[str]:
    """Returns the names of SAPIEN's files that are missing or differ from those that the edits are declared for."""
    paths = {name: STOCK_FOLDER / name for name in KNOWN_FILES}
    digests = {n: hashlib.blake2b(p.read_bytes(), digest_size=16).hexdigest() for n, p in paths.items() if p.is_file()}
    return [name for name, digest in KNOWN_FILES.items() if digests.get(name) != digest]


def made_packs() -> Path:
    """Returns a folder with both packs, written once per machine; `unknown_files` must be empty."""
    texts = {name: (STOCK_FOLDER / name).read_bytes().decode() for name in KNOWN_FILES}
    edited = {name: text for name, text in texts.items() if name.startswith("common/")}
    for name, text in texts.items():
        for path in (name.replace("minimal/", f"{pack}/") for pack in ("whole", "colour")):
            if path not in (*LEFT_OUT, *edited):
                edited[path] = _edited(text, path)
    digest = hashlib.blake2b("".join(edited.values()).encode(), digest_size=8).hexdigest()

    def write(folder: Path) -> None:
        for name, text in edited.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())

    return cached(cache_root() / f"shaders/{sapien.__version__}-{digest}", write)


def _edited(text: str, path: str) -> str:
    lines = dict(enumerate(text.splitlines(keepends=True), 1))
    for number, (name, new) in RENAMED.get(path, {}).items():
        assert lines[number].count(name) == 1, f"line {number} has not one {name}: {lines[number]!r}"
        lines[number] = lines[number].replace(name, new)
    for first, last in CUT.get(path, ()):
        for number in range(first, last + 1):
            del lines[number]
    return "".join(lines.values())


logger = logging.getLogger(__name__)

STOCK = "minimal"  # ManiSkill's default: colour, depth and segmentation in one pass


class Pack(StrEnum):
    """Shaders of a camera; the values of stock ones are ManiSkill's names."""

    colour = "colour"  # "Color" alone, in one pass
    whole = "whole"  # all images of ManiSkill's default pack
    default = "default"  # ManiSkill's pack "default"


Camera = sapien.render.RenderCameraComponent
_packs: WeakKeyDictionary[Camera, Pack] = WeakKeyDictionary()  # SAPIEN reports none before a camera's first image


@cache
def shader_folder(pack: Pack) -> str:
    """Returns the shader pack for scenes without an environment map: a folder, or the name of SAPIEN's pack."""
    if unknown := unknown_files():
        logger.warning(
            "the shaders of sapien %s differ from those that the faster ones are made from (%s): images take longer, "
            "and a process's first one takes seconds",
            sapien.__version__,
            ", ".join(unknown),
        )
        return STOCK
    return str(made_packs() / pack)


def current_pack() -> str:
    """Returns the name of the current stock pack of new cameras, "" if it is not one of SAPIEN's."""
    folder = Path(sapien.render.get_camera_shader_dir())
    known = folder.parent == Path() or folder.parent.resolve() == STOCK_FOLDER.resolve()  # a venv may be a link
    return folder.name if known else ""


def pack_of(camera: Camera) -> Pack:
    """Returns the shaders that a camera gets when it is added to a scene; by default the whole pack."""
    return _packs.get(camera, Pack.whole)


def note_pack(cameras: Iterable[Camera], pack: Pack) -> None:
    """Records the shaders of cameras."""
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
