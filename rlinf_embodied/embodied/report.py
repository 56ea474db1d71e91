"""Pictures of a run: the learning curve from metrics.jsonl and summary.json."""

from __future__ import annotations

import json
from pathlib import Path

from rlinf_embodied.telemetry.metrics import moving_mean, read_metrics


def plot_curve(folder: Path) -> Path:
    """Draws success over minutes of RL into curve.png and returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in read_metrics(folder) if "rollout/success_once" in row]
    summary_path = folder / "summary.json"
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
    minutes = [row["time/total_s"] / 60 for row in rows]
    figure, axes = plt.subplots(figsize=(6.4, 4.0))
    sampled = [100 * row["rollout/success_once"] for row in rows]
    axes.plot(minutes, sampled, color="#9bbbd4", lw=1, label="sampled, each iteration")
    axes.plot(minutes, moving_mean(sampled), color="#1f5f8b", lw=2, label="sampled, mean of 5")
    marks = [(row["time/total_s"] / 60, 100 * row["eval/success_once"]) for row in rows if "eval/success_once" in row]
    if marks:
        axes.plot(*zip(*marks, strict=True), "o--", color="#b4552d", ms=4, lw=1, label="greedy, held-out")
    for key, x in (("before", 0.0), ("after", minutes[-1] if minutes else 0.0)):
        if key in summary:
            low, high = (100 * v for v in summary[key]["success_once_interval"])
            y = 100 * summary[key]["success_once"]
            axes.errorbar([x], [y], [[y - low], [high - y]], fmt="D", color="#b4552d", capsize=4)
            axes.annotate(f"{y:.0f} %", (x, y), textcoords="offset points", xytext=(6, 6), color="#b4552d")
    axes.set(xlabel="minutes of RL", ylabel="success_once, %", ylim=(0, 103), title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    target = folder / "curve.png"
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target
