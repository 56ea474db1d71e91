"""Which kind of oracle a folder is; one line for each golden."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_embodied.errors import DataError
from tests.oracles import autoregressive, full_size, image_ops, oft, oft_discrete
from tests.oracles.goldens import Difference, Goldens

TENSORS, SHAPES = "trimmed.safetensors", "trimmed.json"  # of an oracle that is small enough for a repository
_MODEL, _ROWS = "model.safetensors", "rows"


def check_folders(folder: Path, limit: float) -> int:
    """Checks a folder, or all oracles in it, prints what differs by how much, and returns the exit code.

    Raises:
        DataError: the folder holds no oracle.
        CheckpointError: its checkpoint cannot be read.
    """
    torch.set_num_threads(1)
    checks = checks_in(folder, limit)
    if not checks:
        raise DataError(
            f"folder is {str(folder)!r}, which holds neither checkpoint/ and golden/ nor {image_ops.FILE} nor "
            f"{full_size.KEYS}, nor folders that do: give an oracle folder"
        )
    wrong = [name for name, check in checks.items() if not _report(name, *check())]
    print(
        f"{len(checks) - len(wrong)} of {len(checks)} are within their limits"
        + f" (not: {', '.join(wrong)})" * bool(wrong)
    )
    return 1 if wrong else 0


def checks_in(folder: Path, limit: float) -> dict[str, Callable[[], tuple[list[Difference], list[str]]]]:
    """Returns what to call for each oracle in a folder, by path; each gives (differences, goldens left out)."""
    found: dict[str, Callable[[], tuple[list[Difference], list[str]]]] = {}
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
    for path in [folder, *inside]:
        if (path / "golden").is_dir() and (path / "checkpoint").is_dir():
            found[str(path)] = lambda path=path: _check_network(path, limit)
        elif (path / image_ops.FILE).is_file():
            found[str(path)] = lambda path=path: (image_ops.check(path), [])
    if (folder / full_size.KEYS).is_file():
        found[str(folder / full_size.KEYS)] = lambda: (full_size.check(folder), [])
    return found


def _check_network(folder: Path, limit: float) -> tuple[list[Difference], list[str]]:
    if (folder / "checkpoint" / TENSORS).is_file():
        with tempfile.TemporaryDirectory() as full:
            expand(folder, Path(full) / "oracle")
            return _check_network(Path(full) / "oracle", limit)
    goldens = Goldens(folder, limit)
    if goldens.names(r"(oft|rlinf|simplevla)\..*"):
        oft_discrete.check(goldens)
    elif goldens.names(r"case\d+\.actions_normalized"):
        oft.check(goldens)
    else:
        autoregressive.check(goldens)
    return goldens.found, goldens.unchecked


def expand(folder: Path, out: Path) -> None:
    """Writes the full form of an oracle folder of which no kept golden reads what is left out: zeros come back."""
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


def _report(name: str, found: list[Difference], unchecked: list[str]) -> bool:
    """Prints a line for each difference; returns whether all are within their limits, and there are some."""
    print(name)
    for one in found:
        verdict = "TOO LARGE" if one.too_large else "ok"
        print(f"  {one.name:<50} {one.largest:<10.3g} limit {one.limit:<8.3g} {verdict}")
    if unchecked:
        print(f"  not compared: {', '.join(unchecked)}")
    return bool(found) and not any(one.too_large for one in found)
