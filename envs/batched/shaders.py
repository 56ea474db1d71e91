"""The shaders of the cameras: SAPIEN's own, less a table that takes a CPU seven seconds to fill and is multiplied by 0.

SAPIEN's lighting looks reflections up in an environment map, weighted by a table (the BRDF's integral) that it fills by
sampling when the first picture of a process is taken.  A scene without an environment map reflects black whatever the
table says, so the pictures are bit for bit the same without it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import sapien

from envs.batched.disk_cache import cached

logger = logging.getLogger(__name__)

PACK = "minimal"  # ManiSkill's default: colour, depth and segmentation in one pass
_DECLARATION = re.compile(r"^layout\(set = \d+, binding = \d+\) uniform sampler2D samplerBRDFLUT;\n", re.MULTILINE)
_LOOKUP = "texture(samplerBRDFLUT, vec2(roughness, dotNV)).xy"
_FILES = ("gbuffer.frag", "composite0.frag")  # where the table is declared


def _stock_folder() -> Path:
    return Path(sapien.__file__).parent / "vulkan_shader"


def _adapted() -> dict[str, str] | None:
    """Returns the text of the files to change, None if they are not what this module knows."""
    texts = {name: (_stock_folder() / PACK / name).read_text() for name in _FILES}
    if not all(len(_DECLARATION.findall(text)) == 1 for text in texts.values()):
        return None
    adapted = {name: _DECLARATION.sub("", text).replace(_LOOKUP, "vec2(0)") for name, text in texts.items()}
    return None if any("samplerBRDFLUT" in text for text in adapted.values()) else adapted


@cache
def shader_folder() -> str:
    """Returns the shader pack for scenes without an environment map: a folder, or the name of SAPIEN's own."""
    adapted = _adapted()
    if adapted is None:
        logger.warning("SAPIEN's shaders are not the known ones: each process's first picture takes seconds longer")
        return PACK
    digest = hashlib.blake2b("".join(adapted.values()).encode(), digest_size=8).hexdigest()

    def write(folder: Path) -> None:
        for part in (PACK, "common"):
            shutil.copytree(_stock_folder() / part, folder / part)
        for name, text in adapted.items():
            (folder / PACK / name).write_text(text)

    return str(cached(f"shaders/{sapien.__version__}-{digest}", write) / PACK)


@contextmanager
def camera_shaders(scene: sapien.Scene) -> Iterator[None]:
    """Within it, cameras added to this scene get the lighter shaders (a camera keeps those it was added with)."""
    stock = sapien.render.get_camera_shader_dir()
    sapien.render.set_camera_shader_dir(shader_folder() if scene.render_system.cubemap is None else PACK)
    try:
        yield
    finally:
        sapien.render.set_camera_shader_dir(stock)
