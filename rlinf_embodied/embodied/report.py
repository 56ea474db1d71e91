"""Plots of a run: the learning curve from metrics.jsonl and summary.json."""

from __future__ import annotations

import json
from pathlib import Path

from rlinf_embodied.telemetry.metrics import moving_mean, read_metrics

_BLUE = ("#c3d6e4", "#1f5f8b", "#163f5c")
_METRICS = (  # name, colours, where its numbers stand
    ("success_once", _BLUE, 6),
    ("success_at_end", ("#e8cdbf", "#b4552d", "#7c3a1f"), -12),
)
_RETURN = (("return", _BLUE, 6),)  # of a task without success


def plot_curve(folder: Path) -> Path:
    """Draws success_once and success_at_end over minutes of RL into curve.png and returns its path.

    Of a task without success it draws the return.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    every = read_metrics(folder)
    solved = not any("rollout/return" in row and "rollout/success_once" not in row for row in every)
    drawn, factor, unit = (_METRICS, 100, " %") if solved else (_RETURN, 1, "")
    rows = [row for row in every if f"rollout/{drawn[0][0]}" in row]
    summary_path = folder / "summary.json"
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
    minutes = [row["time/total_s"] / 60 for row in rows]
    figure, axes = plt.subplots(figsize=(6.4, 4.0))
    for metric, (pale, strong, dark), offset in drawn:
        sampled = [factor * row[f"rollout/{metric}"] for row in rows]
        axes.plot(minutes, sampled, color=pale, lw=1)
        axes.plot(minutes, moving_mean(sampled), color=strong, lw=2, label=f"{metric}, sampled, mean of 5")
        for place in ("eval", "check"):
            found = [
                (row["time/total_s"] / 60, factor * row[f"{place}/{metric}"])
                for row in rows
                if f"{place}/{metric}" in row
            ]
            if found:
                axes.plot(*zip(*found, strict=True), "o--", color=dark, ms=4, lw=1, label=f"{metric}, greedy, {place}")
        for key, x in (("before", 0.0), ("after", minutes[-1] if minutes else 0.0)):
            if f"{metric}_interval" in summary.get(key, {}):
                low, high = (factor * v for v in summary[key][f"{metric}_interval"])
                y = factor * summary[key][metric]
                axes.errorbar([x], [y], [[y - low], [high - y]], fmt="D", color=dark, capsize=4)
                axes.annotate(f"{y:.0f}{unit}", (x, y), textcoords="offset points", xytext=(6, offset), color=dark)
    axes.set(xlabel="minutes of RL", ylabel="success, %" if solved else "return", title=folder.name)
    if solved:
        axes.set_ylim(0, 103)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    target = folder / "curve.png"
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target
