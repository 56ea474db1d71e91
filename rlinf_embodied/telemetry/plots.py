"""Plots as PNG files, or as SVG inside a page: lines with intervals, Gantt charts, the learning curve of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rlinf_embodied.telemetry.metrics import moving_mean, wilson
from rlinf_embodied.telemetry.run_reader import SHARES, Run, kept_weights, pooled, read_run
from rlinf_embodied.telemetry.trace import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # takes half a second, so it is imported only to draw

COLOURS = ("#1f5f8b", "#b4552d", "#4d8a4d", "#8a6bb0", "#b08d2f", "#5b9aa8", "#a84d6c", "#6b6b6b")
_MOST_ROWS = 48  # of a Gantt chart; more are illegible


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart, or marks: Line("seed 0", [(0, 0.5), (100, 0.7)], "#1f5f8b")."""

    label: str  # not in the legend if it begins with "_"
    points: Sequence[tuple[float, float]]
    colour: str
    intervals: Sequence[tuple[float, float]] = ()  # (low, high) of each point
    width: float = 2.0
    marks: str = ""  # Matplotlib's format of marks with intervals; "v": upper bounds, without a line


def line_chart(
    lines: Sequence[Line],
    x_label: str = "",
    y_label: str = "",
    size: tuple[float, float] = (7.6, 3.2),
    moment: tuple[float, str] | None = None,
) -> Figure | None:
    """Returns a chart of lines, their intervals as shades or whiskers; None without points.

    A `moment` is drawn as a vertical line with its label: (1000, "weights kept").
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    figure = _figure(size)
    axes = figure.add_subplot()
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        lows, highs = zip(*line.intervals, strict=True) if line.intervals else (ys, ys)
        label = line.label or "_none"
        if line.marks:
            below = [max(0.0, y - low) for y, low in zip(ys, lows, strict=True)]
            above = [max(0.0, high - y) for y, high in zip(ys, highs, strict=True)]
            bars = axes.errorbar(
                xs,
                ys,
                [below, above],
                fmt=line.marks,
                ms=5,
                lw=0.8,
                elinewidth=1.5,
                color=line.colour,
                mfc="none" if line.marks != "o-" else None,
                label=label,
            )
            bars[0].set_gid(label)
            continue
        axes.plot(xs, ys, color=line.colour, label=label, gid=label, lw=line.width, marker="o" if len(xs) == 1 else "")
        if line.intervals:
            axes.fill_between(xs, lows, highs, color=line.colour, alpha=0.16, lw=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if moment is not None:
        axes.axvline(moment[0], color="#444444", lw=1, ls="--", label=moment[1])
    if moment is not None or any(line.label[:1] not in ("", "_") for line in lines):
        axes.legend(fontsize=8)
    return figure


def rate_lines(run: Run, name: str, colour: str, label: str = "") -> list[Line]:
    """Returns a metric sampled in training, five iterations pooled, and the held-out evaluations as marks.

    Shares, such as success_once, are drawn in per cent, other metrics in their units.
    """
    prefix, factor, raw = f"{label}, " if label else "", 1.0, run.column(f"rollout/{name}")
    points = list(zip([x for x, _ in raw], moving_mean([y for _, y in raw]), strict=True))
    bounds: list[tuple[float, float]] = []
    if name in SHARES:
        factor, shares = 100.0, pooled(run, name)
        points = [(step, share) for step, share, _ in shares]
        bounds = [wilson(round(share * number), round(number)) for _, share, number in shares]
    held_out = [(x, y, (y, y)) for x, y in run.column(f"eval/{name}")]
    for step, result in ((0.0, run.before), (run.kept_step, run.after if run.num_iterations else {})):
        if f"{name}_interval" in result:
            held_out.append((step, result[name], result[f"{name}_interval"]))
    held_out.sort(key=lambda mark: mark[0])
    scaled = lambda pairs: [(factor * low, factor * high) for low, high in pairs]  # noqa: E731
    sampled = Line(f"{prefix}{name}, sampled", [(x, factor * y) for x, y in points], colour, scaled(bounds))
    marks, whiskers = [(x, factor * y) for x, y, _ in held_out], scaled(interval for _, _, interval in held_out)
    checks, bounds_of_checks = (
        [(x, factor * y) for x, y in run.column(f"check/{name}{end}")] for end in ("", "_at_most")
    )
    return [
        sampled,
        Line(f"{prefix}{name}, held-out", marks, colour, whiskers, marks="o-"),
        Line(f"{prefix}{name}, check", checks, colour, marks="s:"),
        Line(f"{prefix}{name}, check that ended early: at most", bounds_of_checks, colour, marks="v"),
    ]


def seeds_line(runs: Sequence[Run], name: str, colour: str) -> Line:
    """Returns the mean over runs of one configuration, five iterations pooled, and the band from worst to best."""
    sampled = [rate_lines(run, name, colour)[0].points for run in runs]
    by_step = [list(points) for points in zip(*sampled, strict=False)]  # up to the end of the shortest run
    means = [tuple(fmean(values) for values in zip(*points, strict=True)) for points in by_step]
    bands = [(min(y for _, y in points), max(y for _, y in points)) for points in by_step]
    label = f"{runs[0].folder.name} and {len(runs) - 1} more seeds: mean, worst to best"
    return Line(label, [(x, y) for x, y in means], colour, bands)


def kept_moment(run: Run) -> tuple[float, str] | None:
    """Returns the global step of the kept weights of a finished run, with a label."""
    label = f"kept weights: {kept_weights(run.kept, run.num_iterations)}"
    return (run.kept_step, label) if run.finished and run.metrics else None


def plot_curve(folder: Path) -> Path:
    """Draws the run's main metrics over its steps into curve.png, and returns its path."""
    run = read_run(folder)
    names = run.rates or ["return"]
    lines = [line for name, colour in zip(names, COLOURS, strict=False) for line in rate_lines(run, name, colour)]
    label = "%" if names[0] in SHARES else names[0]
    figure = line_chart(lines, run.unit, label, size=(6.4, 4.0), moment=kept_moment(run))
    target = folder / "curve.png"
    (figure or _figure((6.4, 4.0))).savefig(target, dpi=120)
    return target


# -------------------------------------------------------------------------------------------------------- what ran when
def gantt(title: str, spans: Sequence[Span]) -> Figure:
    """Returns a Gantt chart with a row per worker and stage, in seconds since the first span began."""
    stages = list(dict.fromkeys(span.stage for span in spans))
    places = sorted({(span.worker, span.device, span.stage) for span in spans})
    drawn, more = places[:_MOST_ROWS], len(places) - _MOST_ROWS
    figure = _figure((9.0, 1.1 + 0.25 * len(drawn)))
    axes = figure.add_subplot()
    origin = min((span.start_s for span in spans), default=0.0)
    for height, place in enumerate(drawn):
        bars = [(s.start_s - origin, s.duration_s) for s in spans if (s.worker, s.device, s.stage) == place]
        axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=COLOURS[stages.index(place[2]) % len(COLOURS)])
    axes.set_yticks(range(len(drawn)), [f"worker {worker} ({device}) {stage}" for worker, device, stage in drawn])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title + (f", {more} rows not drawn" if more > 0 else ""), fontsize=9)
    axes.set(xlabel="seconds")
    return figure


def svg(figure: Figure, label: str) -> str:
    """Returns a figure as an SVG element, with data of its first axes for the page's script.

    `data-points`: [x, y, text] of the lines' points; `data-axis`: the ends of the x axis; in units of the viewBox.
    """
    import matplotlib
    import numpy

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = stream.getvalue()
    axes, width, height = figure.axes[0], *(72 * figure.get_size_inches())
    points = []
    for line in axes.lines:
        for xy in numpy.asarray(line.get_xydata()) if line.get_gid() else ():
            x, y = figure.transFigure.inverted().transform(axes.transData.transform(xy))
            name = str(line.get_gid()).removeprefix("_none")
            points.append([round(width * x, 1), round(height * (1 - y), 1), f"{name} {xy[1]:.4g} at {xy[0]:g}".strip()])
    ends = [round(width * x, 1) for x in (axes.get_position().x0, axes.get_position().x1)]
    data = f"data-points='{escape(json.dumps(points))}' data-axis='{ends}'"
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}" {data}', 1)


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
