"""Curves over seeds as a picture: a panel for each task, every seed thinly, and the mean of the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rlinf_embodied.telemetry.plots import COLOURS

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[Curve]]  # of each seed, by what is compared


def draw_panels(panels: Sequence[Panel], out: str) -> None:
    """Writes the panels side by side to `out`, with the suffix .png; nothing for an empty `out`."""
    from matplotlib.figure import Figure

    if not out:
        return
    figure = Figure(figsize=(max(6.4, 4.2 * len(panels)), 4.0), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for (label, curves), colour in zip(panel.curves.items(), COLOURS, strict=False):
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, lw=0.8, alpha=0.4)
            means = [(points[0][0], fmean(y for _, y in points)) for points in zip(*curves, strict=False)]
            axes.plot(*zip(*means, strict=True), color=colour, lw=2, label=label)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(Path(out).with_suffix(".png"), dpi=120)
