"""Compares this machine's bits with those in the repository, stage by stage, and names the first stage that differs.

python -m tests.golden.check                         all recipes against tests/golden; exit code 1: one differs
python -m tests.golden.check recipe=clone,language   some of them: clone, language, pick
python -m tests.golden.check write=true              writes the files anew, after code that changes weights

    clone      a toy env and a small VLA: demonstrations, images, features, losses, weights of a clone; two iterations
               of PPO
    language   two iterations of GRPO on a tiny language model: its start, what it wrote, losses, weights
    pick       ManiSkill's PickCube with physics and images: states, images, features, weights after an update

Stages are in order of computation, so the first one that differs is where to look.  `disturb=<recipe>/<stage>` changes
a bit there, to see that it is named; `pinned=false` computes with this machine's own kernels; `out=<folder>` keeps the
digests as <folder>/<recipe>.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.command_line import main
from rlinf_embodied.config.checks import require

FOLDER = Path(__file__).resolve().parent
NAMES = ("clone", "language", "pick")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    recipe: str = "all"
    write: bool = False
    disturb: str = ""
    pinned: bool = True
    out: str = ""


def first_difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """Returns the first stage whose digest differs or is missing, None if there is none."""
    names = [*expected, *(name for name in found if name not in expected)]
    return next((name for name in names if found.get(name) != expected.get(name)), None)


def compare(recipe: str, found: Mapping[str, str]) -> str | None:
    """Returns a line that names the first stage which differs from the file, None if all are the same."""
    path = FOLDER / f"{recipe}.json"
    if not path.exists():
        again = f"python -m tests.golden.check recipe={recipe} write=true"
        return f"{recipe}: there is no {path}: write it by {again}"
    expected = json.loads(path.read_text())
    name = first_difference(found, expected)
    if name is None:
        return None
    here, there = found.get(name), expected.get(name)
    return f"{recipe}: the first stage that differs is {name!r}: {here} here, {there} in {path.name}"


def write(folder: Path, recipe: str, found: Mapping[str, str]) -> None:
    """Writes the digests of a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{recipe}.json").write_text(json.dumps(found, indent=1) + "\n")


def check(own: Options) -> int:
    """Computes the recipes and returns the exit code."""
    names = NAMES if own.recipe == "all" else own.recipe.split(",")
    require(set(names) <= set(NAMES), "recipe", own.recipe, "it names recipes", f"use some of {', '.join(NAMES)}")
    if own.pinned:
        portable.pin()
        portable.verify()
    from tests.golden.recipes import digests  # imports torch and numpy, which must find the pins

    recipe, _, stage = own.disturb.partition("/")
    wrong = 0
    for name in names:
        found = digests(name, stage if name == recipe else None)
        if own.out:
            write(Path(own.out), name, found)
        if own.write:
            write(FOLDER, name, found)
            continue
        said = compare(name, found)
        wrong += said is not None
        print(said or f"{name}: {len(found)} stages are the same", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    main(check, Options)
