"""The results of a benchmark: a table to print, and JSON that names the machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path

from experiments.bench.harness.statistics import Goal
from rlinf_embodied.cluster.hardware import gpus, num_cores, processor
from rlinf_embodied.telemetry.run_folder import git_revision, library_versions
from rlinf_embodied.telemetry.tables import text_table


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells below a header, as text."""
    return text_table([dict(zip(header, row, strict=True)) for row in rows])


def machine() -> dict[str, object]:
    """Returns what the numbers were measured on, and how busy it was."""
    return {
        "processor": processor() or platform.machine(),
        "cores": num_cores(),
        "gpus": [name for name, _ in gpus()],
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load_average": list(os.getloadavg()),
        "versions": library_versions(),
        "git_revision": git_revision(),
    }


def write_results(out: str, content: Mapping[str, object]) -> None:
    """Writes JSON to `out` (.json where it has no suffix), unless it is empty, and says so."""
    if not out:
        return
    path = Path(out) if Path(out).suffix else Path(out).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=_plain) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _plain(value: object) -> object:
    if isinstance(value, Goal):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
