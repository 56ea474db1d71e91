"""Puts finished runs side by side: a Markdown table and one picture of their learning curves.

python experiments/compare_runs.py runs/compared runs/seed0 runs/seed1 runs/seed2

writes runs/compared.md and runs/compared.png.  All runs are of one workflow: VLAs, or language models.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import moving_mean, read_metrics
from rlinf_embodied.telemetry.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def reasons(self) -> bool:
        """Whether it trained a language model."""
        return "accuracy_before" in self.summary

    @property
    def metric(self) -> str:
        """What is measured before and after."""
        solved = "success_once" if "success_once" in self.summary["after"] else "return"
        return "accuracy" if self.reasons else solved

    @property
    def unit(self) -> str:
        """What the global step counts."""
        return "tokens" if self.reasons else "env steps"


def read(folder: Path) -> Run:
    try:
        found = [json.loads((folder / name).read_text()) for name in ("summary.json", "manifest.json")]
    except OSError as error:
        raise ConfigError(f"{folder} is no finished run ({error}): give run folders with a summary.json") from error
    return Run(folder, *found)


def percent(result: dict[str, Any], name: str, number: int | None = None) -> str:
    if name not in result:
        return "-"
    low, high = result[f"{name}_interval"]
    factor, unit = (1, "") if name == "return" else (100, " %")
    told = f"{factor * result[name]:.1f}{unit} [{factor * low:.1f}, {factor * high:.1f}]"
    return told + (f" of {number}" if number else "")


def row(run: Run) -> dict[str, str]:
    """Returns a line of the table, by column."""
    summary, before, after = run.summary, run.summary["before"], run.summary["after"]
    number = before["num_problems" if run.reasons else "num_episodes"]
    apart = after[f"{run.metric}_interval"][0] > before[f"{run.metric}_interval"][1]
    cells = {
        "run": run.folder.name,
        "seed": str(run.manifest["seed"]),
        "plan": f"{summary['plan']} on {run.manifest['hardware']['devices']}",
        f"{run.metric} before": percent(before, run.metric, number),
        f"{run.metric} after": percent(after, run.metric, number),
    }
    if not run.reasons:
        cells["success_at_end before"] = percent(before, "success_at_end")
        cells["success_at_end after"] = percent(after, "success_at_end")
    if run.reasons:
        cells["before, forced prefix"] = percent(before, "forced_accuracy")
        samples = before.get("num_samples", 0)
        cells[f"mean of {samples} samples, before"] = percent(before, "pass@1")
        cells["after "] = percent(after, "pass@1")
    steps, speed = ("tokens", "tokens_per_s") if run.reasons else ("env_steps", "env_steps_per_s")
    return cells | {
        run.unit: f"{summary[steps]:,}",
        "RL minutes": f"{summary['rl_s'] / 60:.1f}",
        f"{run.unit}/s": f"{summary[speed]:.0f}",
        "overlap of intervals": "no" if apart else "yes",
    }


def table(runs: Sequence[Run]) -> str:
    rows = [row(run) for run in runs]
    return markdown_table(list(rows[0]), [[line.get(column, "-") for column in rows[0]] for line in rows])


def picture(runs: Sequence[Run], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metric = runs[0].metric
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for run, color in zip(runs, plt.cm.viridis([k / max(len(runs), 2) for k in range(len(runs))]), strict=True):
        rows = [r for r in read_metrics(run.folder) if f"rollout/{metric}" in r]
        steps = [r["global_step"] / 1e3 for r in rows]
        means = moving_mean([100 * r[f"rollout/{metric}"] for r in rows])
        axes.plot(steps, means, color=color, lw=1.2, label=f"{run.folder.name}, sampled (mean of 5)")
        marks = [(r["global_step"] / 1e3, 100 * r[f"eval/{metric}"]) for r in rows if f"eval/{metric}" in r]
        first, last = (100 * run.summary[when][metric] for when in ("before", "after"))
        axes.plot(*zip((0.0, first), *marks, (steps[-1], last), strict=True), "D--", color=color, ms=4, lw=0.8)
    axes.set(xlabel=f"thousand {runs[0].unit} of RL", ylabel=f"{metric}, %", ylim=(0, 103))
    axes.set_title("diamonds: greedy, held-out", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main(target: Path, folders: list[Path]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    runs = [read(folder) for folder in folders]
    if len({run.reasons for run in runs}) > 1:
        raise ConfigError("the runs are of two workflows, whose numbers cannot be compared: give those of one")
    lines = [table(runs), ""]
    for run in runs:
        hardware = run.manifest["hardware"]
        command = shlex.join(["python", *run.manifest["command"]])
        lines.append(
            f"- `{run.folder.name}`: `{command}`, {hardware['description']}, torch {run.manifest['versions']['torch']}"
        )
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")
    picture(runs, target.with_suffix(".png"))
    print("\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
