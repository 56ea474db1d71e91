"""The small form of an oracle: rows of the vocabulary and layers that no golden reads come back as zeros."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, SHAPES = "trimmed.safetensors", "trimmed.json"
_MODEL, _ROWS = "model.safetensors", "rows"


def expand(folder: Path, out: Path) -> None:
    """Writes the full form of a trimmed oracle folder."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(TENSORS, SHAPES))
    stored = load_file(folder / "checkpoint" / TENSORS)
    files: dict[str, dict[str, Tensor]] = {}
    for place, shape in json.loads((folder / "checkpoint" / SHAPES).read_text()).items():
        file, name = place.split("/")
        rows = stored.get(f"{_ROWS}/{place}")
        values = stored.get(place)
        tensor = torch.zeros(shape, dtype=torch.bfloat16) if values is None or rows is not None else values
        if values is not None and rows is not None:
            tensor[rows] = values
        files.setdefault(file, {})[name] = tensor
    for file, tensors in files.items():
        if file == _MODEL:
            save_file(tensors, out / "checkpoint" / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, out / "checkpoint" / file)


def is_trimmed(folder: Path) -> bool:
    """Whether a folder is a trimmed oracle."""
    return (folder / "checkpoint" / TENSORS).is_file()
