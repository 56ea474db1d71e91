"""The section of learning curves, of one run or of several."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlinf_embodied.reporting.drawings import COLOURS, Chart, Line, line_chart
from rlinf_embodied.reporting.pieces import folded, missing
from rlinf_embodied.reporting.runs import Run, pooled
from rlinf_embodied.telemetry.metrics import moving_mean, wilson

_SMALL = (360, 190)  # pixels of a small chart


def curves(runs: Sequence[Run]) -> str:
    """Learning curves with 95 % intervals: sampled during training, and greedy on held-out episodes."""
    charts = []
    for name in dict.fromkeys(name for run in runs for name in run.rates):
        lines = [
            line
            for k, run in enumerate(runs)
            for line in _rate_lines(run, name, COLOURS[k % len(COLOURS)], len(runs) > 1)
        ]
        chart = line_chart(Chart(runs[0].unit, f"{name}, %", (0, 100), lines=lines))
        charts.append(f"<h4>{escape(name)}</h4>{chart}" if chart else "")
    note = (
        "<p>Lines: sampled in training, five iterations pooled, with the 95 % interval of their number "
        "(completions of one problem count once). Marks: held-out evaluation, with its interval.</p>"
    )
    shown = "".join(charts)
    return (note + shown if shown else missing("no success or accuracy was written")) + _small_charts(runs)


def _rate_lines(run: Run, name: str, colour: str, several: bool) -> list[Line]:
    label = f"{run.name}, " if several else ""
    points = pooled(run, name)
    bounds = [wilson(round(p * n), round(n)) for _, p, n in points]
    sampled = Line(
        f"{label}sampled",
        [(x, 100 * p) for x, p, _ in points],
        colour,
        [(100 * low, 100 * high) for low, high in bounds],
    )
    marks = []
    end = points[-1][0] if points else 0.0
    number = run.config.get("eval", {})
    tried = number.get("num_episodes") or number.get("num_problems")
    between = [(x, p, wilson(p * tried, tried) if tried else (p, p)) for x, p in run.column(f"eval/{name}")]
    if f"{name}_interval" in run.before:
        marks.append((0.0, run.before[name], run.before[f"{name}_interval"]))
    marks += between
    if f"{name}_interval" in run.after and run.num_iterations:
        marks.append((end, run.after[name], run.after[f"{name}_interval"]))
    dark = colour if several else "#222222"
    held_out = Line(
        f"{label}held-out",
        [(x, 100 * p) for x, p, _ in marks],
        dark,
        [(100 * low, 100 * high) for _, _, (low, high) in marks],
        marks=True,
    )
    return [line for line in (sampled, held_out) if line.points]


def _small_charts(runs: Sequence[Run]) -> str:
    """Returns the other metrics, each small, iteration by iteration and as a mean over five."""
    names = dict.fromkeys(name for run in runs for row in run.metrics for name in row)
    groups = ("rollout/", "losses/", "check/", "charts/")
    shown = [
        name
        for name in names
        if name.startswith(groups) and name.partition("/")[2] not in {n for r in runs for n in r.rates}
    ]
    charts = []
    for name in shown:
        lines = []
        for k, run in enumerate(runs):
            points = run.column(name)
            means = moving_mean([y for _, y in points])
            label = run.name if len(runs) > 1 else ""
            lines.append(
                Line(label, [(x, y) for (x, _), y in zip(points, means, strict=True)], COLOURS[k % len(COLOURS)])
            )
        drawn = line_chart(Chart(runs[0].unit, "", None, *_SMALL, lines=lines))
        charts.append(f"<figure><figcaption>{escape(name)}</figcaption>{drawn}</figure>" if drawn else "")
    inside = f'<div class="grid-of-charts">{"".join(charts)}</div>'
    return folded(f"{len(shown)} more metrics, means of five iterations", inside) if shown else ""
