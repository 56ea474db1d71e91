"""The learning curve of a reasoning run, from metrics.jsonl and summary.json."""

from __future__ import annotations

import json
from pathlib import Path

from rlinf_embodied.telemetry.metrics import moving_mean, read_metrics


def plot_curve(folder: Path) -> Path:
    """Draws accuracy over minutes of RL into curve.png and returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    minutes = [row["time/total_s"] / 60 for row in rows]
    sampled = [100 * row["rollout/accuracy"] for row in rows]
    figure, (axes, lengths) = plt.subplots(2, 1, figsize=(6.4, 5.6), sharex=True, height_ratios=[3, 1])
    axes.plot(minutes, sampled, color="#9bbbd4", lw=1, label="sampled in training, each iteration")
    axes.plot(minutes, moving_mean(sampled, 10), color="#1f5f8b", lw=2, label="mean of 10")
    marks = [(row["time/total_s"] / 60, 100 * row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    if marks:
        axes.plot(*zip(*marks, strict=True), "o--", color="#b4552d", ms=4, lw=1, label="greedy, held-out")
    for key, x in (("before", 0.0), ("after", minutes[-1] if minutes else 0.0)):
        low, high = (100 * v for v in summary[key]["accuracy_interval"])
        y = 100 * summary[key]["accuracy"]
        axes.errorbar([x], [y], [[y - low], [high - y]], fmt="D", color="#b4552d", capsize=4)
        axes.annotate(f"{y:.0f} %", (x, y), textcoords="offset points", xytext=(6, 6), color="#b4552d")
    forced = summary["before"].get("forced_accuracy")
    if forced is not None:
        axes.axhline(100 * forced, color="#777777", ls=":", lw=1, label="start, forced prefix")
    axes.set(ylabel="accuracy, %", ylim=(0, 103), title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    lengths.plot(minutes, [row["rollout/length"] for row in rows], color="#1f5f8b", lw=1)
    lengths.set(xlabel="minutes of RL", ylabel="tokens")
    lengths.grid(alpha=0.3)
    figure.tight_layout()
    target = folder / "curve.png"
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target
