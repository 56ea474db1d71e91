"""Writes what the batched backend looks up, envs/batched/covered.json, from what `experiments.bench.coverage` found.

python -m experiments.setup.covered [results=docs/results/coverage.json]

The table holds for the versions of ManiSkill and SAPIEN that the results were found with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.coverage.table import results_of
from rlinf_embodied.command_line import main
from rlinf_embodied.errors import DataError

COVERED = Path(__file__).resolve().parents[2] / "envs" / "batched" / "covered.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    results: str = "docs/results/coverage.json"


def covered(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what differs from stock envs, "" for nothing, by task, robot and control mode."""
    installed = found.get("machine", found)["versions"]
    table: dict = {}
    for name, task in found["tasks"].items():
        for robot, mode, result in results_of(task):
            if result["verdict"] not in ("equal", "fallback"):
                continue
            robots = [robot, "default"] if robot == task.get("default_robot") else [robot]
            modes = [mode, "default"] if result.get("default") else [mode]
            for robot_key in robots:
                table.setdefault(name, {}).setdefault(robot_key, {}).update(dict.fromkeys(modes, result["reason"]))
    return {"versions": {name: installed[name] for name in ("mani_skill", "sapien")}, "tasks": table}


def write(own: Options) -> None:
    try:
        found = json.loads(Path(own.results).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"results is {own.results!r}, which cannot be read ({error}): give what experiments.bench.coverage wrote"
        ) from error
    COVERED.write_text(json.dumps(covered(found), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written to {COVERED}")


if __name__ == "__main__":
    main(write, Options)
