"""The outcomes of a recipe's seeds as rows, with worst, median and best."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlinf_embodied.telemetry.metrics import Rate, percent
from rlinf_embodied.telemetry.tables import markdown_table

HEADER = ["seed", "once before", "once after", "at_end before", "at_end after", "env steps", "warm start", "RL", "all"]
KEYS = ("success_once", "success_at_end")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed gave."""

    seed: int
    before: Mapping[str, Any]  # evaluation summaries
    after: Mapping[str, Any]
    env_steps: int
    iterations: int
    warm_start_min: float
    rl_min: float
    checks_min: float
    core_min: float  # processor time of the whole command
    weights_sha256: str
    num_demos: int
    teacher: Mapping[str, Any] | None = None  # the evaluation of the policy that demonstrated; None: the expert


def outcome_of(folder: Path, seed: int, core_min: float) -> Outcome:
    """Returns what the runs in a seed's folder came to."""
    teacher = folder / "teacher/summary.json"
    run = folder / "student" if teacher.exists() else folder
    summary = json.loads((run / "summary.json").read_text())
    kept = ("before", "after", "env_steps", "iterations", "weights_sha256")
    return Outcome(
        seed=seed,
        warm_start_min=summary["startup_s"]["warm start"] / 60,
        rl_min=summary["rl_s"] / 60,
        checks_min=summary["checks_s"] / 60,
        core_min=core_min,
        num_demos=OmegaConf.load(run / "config.yaml").warm_start.num_demos,
        teacher=json.loads(teacher.read_text())["after"] if teacher.exists() else None,
        **{name: summary[name] for name in kept},
    )


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: (outcome.num_demos, outcome.seed))


def cells(outcome: Outcome) -> list[str]:
    both = (outcome.before, outcome.after)
    shown = [percent(summary, key) for key in KEYS for summary in both]
    minutes = [f"{value:.1f} min" for value in (outcome.warm_start_min, outcome.rl_min)]
    taught = "" if outcome.teacher is None else f" (teacher {percent(outcome.teacher, KEYS[0])})"
    return [f"{outcome.seed}{taught}", *shown, f"{outcome.env_steps:,}", *minutes, f"{outcome.core_min:.1f} core-min"]


def overview(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Returns worst, median and best over the seeds, and all episodes together."""
    columns = [(key, [getattr(o, when) for o in outcomes]) for key in KEYS for when in ("before", "after")]
    rows = []
    for name, choose in (("worst", min), ("median", statistics.median), ("best", max)):
        values = [f"{100 * choose(summary[key] for summary in column):.1f} %" for key, column in columns]
        backwards = {"worst": max, "best": min}.get(name, statistics.median)
        steps = f"{int(backwards(o.env_steps for o in outcomes)):,}"
        minutes = [f"{backwards(getattr(o, key) for o in outcomes):.1f} min" for key in ("warm_start_min", "rl_min")]
        rows.append([name, *values, steps, *minutes, f"{backwards(o.core_min for o in outcomes):.1f} core-min"])
    together = []
    for key, column in columns:
        number = sum(summary["num_episodes"] for summary in column)
        solved = sum(round(summary[key] * summary["num_episodes"]) for summary in column)
        together.append(str(Rate(solved, number)))
    return [*rows, ["all episodes", *together, f"{sum(o.env_steps for o in outcomes):,}", "", "", ""]]


def page(outcomes: Sequence[Outcome]) -> str:
    """Returns tables in Markdown, one for each number of demonstrations; 95 % Wilson intervals."""
    parts = []
    for number, group in groupby(outcomes, lambda outcome: outcome.num_demos):
        part = list(group)
        rows = [*(cells(outcome) for outcome in part), *overview(part)]
        parts.append(f"{number} demonstrations:\n\n{markdown_table(HEADER, rows)}")
    return "\n\n".join(parts)
