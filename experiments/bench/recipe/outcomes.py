"""The outcomes of a recipe's seeds as rows, with worst, median and best."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rlinf_embodied.telemetry.metrics import Rate, percent
from rlinf_embodied.telemetry.run_reader import read_run
from rlinf_embodied.telemetry.tables import markdown_table

HEADER = ["seed", "once before", "once after", "at_end before", "at_end after", "env steps", "warm start", "RL", "all"]
KEYS = ("success_once", "success_at_end")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed gave."""

    seed: int
    num_demos: int
    core_min: float  # processor time of the whole command
    summary: Mapping[str, Any]  # of its run
    teacher: Mapping[str, Any] | None = None  # the evaluation of the policy that demonstrated; None: the expert

    @property
    def minutes(self) -> tuple[float, float]:
        """Of the warm start, and of RL."""
        return self.summary["startup_s"]["warm start"] / 60, self.summary["rl_s"] / 60


def outcome_of(folder: Path, seed: int, core_min: float) -> Outcome:
    """Returns what the runs in a seed's folder came to."""
    last, first = folder / "student", folder / "teacher"
    run, teacher = read_run(last if last.exists() else folder), read_run(first) if first.exists() else None
    return Outcome(seed, run.config["warm_start"]["num_demos"], core_min, run.summary, teacher and teacher.after)


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: (outcome.num_demos, outcome.seed))


def cells(outcome: Outcome) -> list[str]:
    """Returns the row of a seed below HEADER."""
    shown = [percent(outcome.summary[when], key) for key in KEYS for when in ("before", "after")]
    minutes = [f"{value:.1f} min" for value in outcome.minutes]
    taught = "" if outcome.teacher is None else f" (teacher {percent(outcome.teacher, KEYS[0])})"
    steps = f"{outcome.summary['env_steps']:,}"
    return [f"{outcome.seed}{taught}", *shown, steps, *minutes, f"{outcome.core_min:.1f} core-min"]


def overview(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Returns worst, median and best over the seeds, and all episodes together."""
    columns = [(key, [o.summary[when] for o in outcomes]) for key in KEYS for when in ("before", "after")]
    env_steps, rows = [o.summary["env_steps"] for o in outcomes], []
    for name, choose, least in (
        ("worst", min, max),
        ("median", statistics.median, statistics.median),
        ("best", max, min),
    ):
        values = [f"{100 * choose(summary[key] for summary in column):.1f} %" for key, column in columns]
        minutes = [f"{least(each):.1f} min" for each in zip(*(o.minutes for o in outcomes), strict=True)]
        core_min = f"{least(o.core_min for o in outcomes):.1f} core-min"
        rows.append([name, *values, f"{int(least(env_steps)):,}", *minutes, core_min])
    together = []
    for key, column in columns:
        number = sum(summary["num_episodes"] for summary in column)
        together.append(str(Rate(sum(round(one[key] * one["num_episodes"]) for one in column), number)))
    return [*rows, ["all episodes", *together, f"{sum(env_steps):,}", "", "", ""]]


def page(outcomes: Sequence[Outcome]) -> str:
    """Returns tables in Markdown, one for each number of demonstrations; 95 % Wilson intervals."""
    parts = []
    for number, group in groupby(outcomes, lambda outcome: outcome.num_demos):
        part = list(group)
        rows = [*(cells(outcome) for outcome in part), *overview(part)]
        parts.append(f"{number} demonstrations:\n\n{markdown_table(HEADER, rows)}")
    return "\n\n".join(parts)
