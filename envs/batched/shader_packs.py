"""Shader packs that are made from the installed SAPIEN's shaders by declared edits of its lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import sapien

from envs.batched.disk_cache import cached

STOCK_FOLDER = Path(sapien.__file__).parent / "vulkan_shader"
KNOWN_FILES = {  # blake2b of the texts that the line numbers below belong to
    "common/lights.glsl": "dc2a40e2c9a21134da4f6f4c20d06415",
    "common/shadow.glsl": "b54213f73790ccd25e1f57db3940c88e",
    "common/view.glsl": "6b8319d9e277c2b0cbc4da42b4edf708",
    "minimal/composite.vert": "beec0d63f308d4f7be0c11f8776fe8c2",
    "minimal/composite0.frag": "6941b318224ca693ddef00796b124b94",
    "minimal/gbuffer.frag": "b4022d945dff569a6be00c8e6af5290d",
    "minimal/gbuffer.vert": "670089d17dacb5d43e5d1fb20ab1779a",
    "minimal/shadow.vert": "78c99a90414aad4e129789b927c877dd",
}


@dataclass(frozen=True, slots=True)
class Edit:
    """What is changed in a file; lines count from 1, as in `Edit(cut=((100, 100), (111, 115)))`."""

    cut: tuple[tuple[int, int], ...] = ()  # first and last line of each part that is taken out
    renamed: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # line: (name in it, new name)


_REFLECTIONS = ((100, 100), (111, 115), (117, 124), (320, 324))  # the table, two functions, their calls
_COLOUR = ("outColorRaw", "outColor")
EDITS: dict[str, dict[str, Edit | None]] = {  # by pack and file; None: the pack has no such file
    "whole": {"gbuffer.frag": Edit(_REFLECTIONS), "composite0.frag": Edit(((71, 71),))},  # the table again
    "colour": {
        "gbuffer.frag": Edit((*_REFLECTIONS, (133, 133), (328, 328)), {132: _COLOUR, 327: _COLOUR}),
        "composite0.frag": None,
        "composite.vert": None,
    },
}


def unknown_files() -> list[str]:
    """Returns which of SAPIEN's files are missing or have another text than the edits were declared for."""
    paths = {name: STOCK_FOLDER / name for name in KNOWN_FILES}
    found = {n: hashlib.blake2b(p.read_bytes(), digest_size=16).hexdigest() for n, p in paths.items() if p.is_file()}
    return [name for name, digest in KNOWN_FILES.items() if found.get(name) != digest]


def made_packs() -> Path:
    """Returns a folder with the packs of `EDITS`, made once per machine; all files of SAPIEN's have to be known."""
    files = made_files()
    digest = hashlib.blake2b("".join(files.values()).encode(), digest_size=8).hexdigest()

    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())

    return cached(f"shaders/{sapien.__version__}-{digest}", write)


def made_files() -> dict[str, str]:
    """Returns the texts of the packs and of what they include, by path."""
    made = {}
    for name in KNOWN_FILES:
        folder, file = name.split("/")
        text = (STOCK_FOLDER / name).read_bytes().decode()
        if folder == "common":
            made[name] = text
            continue
        for pack, edits in EDITS.items():
            edit = edits.get(file, Edit())
            if edit is not None:
                made[f"{pack}/{file}"] = _edited(text, edit)
    return made


def _edited(text: str, edit: Edit) -> str:
    lines = dict(enumerate(text.splitlines(keepends=True), 1))
    for number, (name, new) in edit.renamed.items():
        assert lines[number].count(name) == 1, f"line {number} has not one {name}: {lines[number]!r}"
        lines[number] = lines[number].replace(name, new)
    for first, last in edit.cut:
        for number in range(first, last + 1):
            del lines[number]
    return "".join(lines.values())
