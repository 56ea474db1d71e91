"""Finished runs side by side: a Markdown table and one picture of their learning curves."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.runs import Run, read_run
from rlinf_embodied.telemetry.metrics import moving_mean
from rlinf_embodied.telemetry.tables import markdown_table


def write(target: Path, folders: Sequence[Path]) -> str:
    """Writes <target>.md and <target>.png of run folders, and returns the text of the first.

    Raises:
        ConfigError: a folder holds no finished run, or the runs are of two workflows.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if not run.summary or not run.manifest:
            raise ConfigError(f"{run.folder} is no finished run: give run folders with summary.json and manifest.json")
    if len({reasons(run) for run in runs}) > 1:
        raise ConfigError("the runs are of two workflows, whose numbers cannot be compared: give those of one")
    text = "\n".join([table(runs), "", *map(_command, runs)])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    draw(runs, target.with_suffix(".png"))
    return text


def reasons(run: Run) -> bool:
    """Returns whether a run trained a language model."""
    return "accuracy_before" in run.summary


def metric_of(run: Run) -> str:
    """Returns what is measured before and after."""
    return "accuracy" if reasons(run) else "success_once" if "success_once" in run.after else "return"


def table(runs: Sequence[Run]) -> str:
    """Returns a line for each run, in Markdown."""
    rows = [_row(run) for run in runs]
    return markdown_table(list(rows[0]), [[line.get(column, "-") for column in rows[0]] for line in rows])


def _row(run: Run) -> dict[str, str]:
    """Returns a line of the table, by column."""
    summary, before, after, metric = run.summary, run.before, run.after, metric_of(run)
    number = before["num_problems" if reasons(run) else "num_episodes"]
    apart = after[f"{metric}_interval"][0] > before[f"{metric}_interval"][1]
    cells = {
        "run": run.name,
        "seed": str(run.manifest["seed"]),
        "plan": f"{summary['plan']} on {run.manifest['hardware']['devices']}",
        f"{metric} before": _percent(before, metric, number),
        f"{metric} after": _percent(after, metric, number),
    }
    if reasons(run):
        cells["before, forced prefix"] = _percent(before, "forced_accuracy")
        samples = before.get("num_samples", 0)
        cells[f"mean of {samples} samples, before"] = _percent(before, "pass@1")
        cells["after "] = _percent(after, "pass@1")
    else:
        cells["success_at_end before"] = _percent(before, "success_at_end")
        cells["success_at_end after"] = _percent(after, "success_at_end")
    steps, speed = ("tokens", "tokens_per_s") if reasons(run) else ("env_steps", "env_steps_per_s")
    unit = steps.replace("_", " ")
    return cells | {
        unit: f"{summary[steps]:,}",
        "RL minutes": f"{summary['rl_s'] / 60:.1f}",
        f"{unit}/s": f"{summary[speed]:.0f}",
        "overlap of intervals": "no" if apart else "yes",
    }


def _percent(result: Mapping[str, Any], name: str, number: int | None = None) -> str:
    if name not in result:
        return "-"
    low, high = result[f"{name}_interval"]
    factor, unit = (1, "") if name == "return" else (100, " %")
    told = f"{factor * result[name]:.1f}{unit} [{factor * low:.1f}, {factor * high:.1f}]"
    return told + (f" of {number}" if number else "")


def _command(run: Run) -> str:
    manifest = run.manifest
    command = shlex.join(["python", *manifest["command"]])
    return f"- `{run.name}`: `{command}`, {manifest['hardware']['description']}, torch {manifest['versions']['torch']}"


def draw(runs: Sequence[Run], target: Path) -> None:
    """Draws what was sampled over the steps of training, and as diamonds the greedy evaluations."""
    import matplotlib
    from matplotlib.figure import Figure

    metric = metric_of(runs[0])
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes, palette = figure.subplots(), matplotlib.colormaps["viridis"]
    for number, run in enumerate(runs):
        color, sampled = palette(number / max(len(runs), 2)), run.column(f"rollout/{metric}")
        steps, means = [step / 1e3 for step, _ in sampled], moving_mean([100 * value for _, value in sampled])
        axes.plot(steps, means, color=color, lw=1.2, label=f"{run.name}, sampled (mean of 5)")
        marks = [(step / 1e3, 100 * value) for step, value in run.column(f"eval/{metric}")]
        first, last = (100 * result[metric] for result in (run.before, run.after))
        axes.plot(*zip((0.0, first), *marks, (steps[-1], last), strict=True), "D--", color=color, ms=4, lw=0.8)
    axes.set(xlabel=f"thousand {runs[0].unit} of RL", ylabel=f"{metric}, %", ylim=(0, 103))
    axes.set_title("diamonds: greedy, held-out", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(target, dpi=120)
