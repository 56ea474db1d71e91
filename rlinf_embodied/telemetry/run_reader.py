"""Reads the folder of a finished, running or stopped run; any file may be missing or incomplete."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import read_metrics

SHARES = {  # metrics in per cent, and the metric that counts their trials
    "success_once": "rollout/episodes",
    "success_at_end": "rollout/episodes",
    "accuracy": "rollout/completions",
}
UNITS = {"charts/SPS": "env steps", "charts/tokens_per_s": "tokens", "charts/chunks_per_s": "chunks"}
_FILES = ("config.yaml", "manifest.json", "plan.json", "plan_report.json", "summary.json")
_POOLED = 5  # iterations whose episodes are counted together


@dataclass(frozen=True, slots=True)
class Run:
    """The content of a run folder; missing parts are {} or ()."""

    folder: Path
    finished: bool
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    plan: Mapping[str, Any]
    plan_report: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float | None]]  # one per iteration
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    missing: tuple[str, ...]  # files with reasons, for example ("summary.json", "plan.json (Expecting value: line 1)")

    @property
    def num_iterations(self) -> int:
        return int(self.metrics[-1]["iteration"] or 0) if self.metrics else int(self.summary.get("iterations", 0))

    @property
    def kept(self) -> int:
        """The iteration of a finished run's final weights: the last one, or that of its best check."""
        return int(self.summary.get("weights_of_iteration", self.num_iterations))

    @property
    def kept_step(self) -> float:
        """The global step of the kept weights."""
        return next((float(row["global_step"] or 0) for row in self.metrics if row["iteration"] == self.kept), 0.0)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.metrics for name in row))

    @property
    def unit(self) -> str:
        """The unit of `global_step`."""
        return next((unit for name, unit in UNITS.items() if name in self.names), "steps")

    @property
    def rates(self) -> list[str]:
        """The success rates that the run is judged by, most important first."""
        known = [name for name in SHARES if name in self.before or f"rollout/{name}" in (self.metrics or [{}])[-1]]
        return known or [name for name in self.before if f"{name}_interval" in self.before]

    def column(self, name: str) -> list[tuple[float, float]]:
        """Returns (global step, value) of each iteration that has a metric."""
        rows = [(row.get("global_step"), row.get(name)) for row in self.metrics]
        return [(float(x), float(y)) for x, y in rows if x is not None and y is not None and math.isfinite(y)]


def kept_weights(kept: int, last: int) -> str:
    """Returns a text that names the iteration of the final weights of a run of `last` iterations."""
    which = "the last" if kept == last else f"the best check; the run had {last}"
    return f"of iteration {kept} ({which})"


def read_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        ConfigError: the folder does not exist, or holds no run.
    """
    folder = folder.expanduser()
    if not (folder / "config.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        what = "holds neither config.yaml nor metrics.jsonl" if folder.is_dir() else "does not exist"
        raise ConfigError(f"run.dir is {str(folder)!r}, but it {what}: give the run.dir of a training run")
    missing: list[str] = []
    config, manifest, plan, plan_report, summary = (_read(folder / name, missing) for name in _FILES)
    metrics = read_metrics(folder)
    trained = max((int(row["iteration"]) for row in metrics), default=0)
    is_over = bool(summary) and trained <= int(summary.get("iterations", 0))  # a resumed run keeps its old summary
    files = (config, manifest, plan, plan_report, summary if is_over else {})
    before, after = summary.get("before", {}), summary.get("after", {}) if is_over else {}
    return Run(folder.resolve(), is_over, *files, metrics, before, after, tuple(missing))


def pooled(run: Run, name: str) -> list[tuple[float, float, float]]:
    """Returns (global step, share, number of independent trials), each pooled over the last five iterations.

    The completions of a problem share a prompt, so they count as one trial.
    """
    group = max(1, int(run.config.get("algorithm", {}).get("group_size") or 1)) if name == "accuracy" else 1
    counts = SHARES.get(name, "")
    counted: list[tuple[float, float, float]] = []  # global step, successes, trials
    for row in run.metrics:
        share, number = row.get(f"rollout/{name}"), row.get(counts)
        if share is not None and number:
            counted.append((float(row["global_step"] or 0), float(share) * float(number), float(number)))
    points = []
    for end in range(1, len(counted) + 1):
        window = counted[max(0, end - _POOLED) : end]
        number = sum(entry[2] for entry in window)
        points.append((window[-1][0], sum(entry[1] for entry in window) / number, number / group))
    return points


def _read(path: Path, missing: list[str]) -> dict[str, Any]:
    """Returns the mapping in a YAML or JSON file; {} if it cannot be read, and adds it to `missing`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        missing.append(path.name)
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        missing.append(f"{path.name} ({error})")
        return {}
    return content if isinstance(content, dict) else {}
