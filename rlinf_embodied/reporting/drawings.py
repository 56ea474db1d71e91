"""Drawings as inline SVG: lines with intervals, and bars over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#1f5f8b", "#b4552d", "#4d8a4d", "#8a6bb0", "#b08d2f", "#5b9aa8", "#a84d6c", "#6b6b6b")
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34  # margins, for labels
_ROW = 18  # height of a bar's row
_LABELS = 170  # width of the names of rows


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart, or its marks: Line("seed 0", [(0, 0.5), (100, 0.7)], "#1f5f8b")."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    intervals: Sequence[tuple[float, float]] = ()  # (low, high) of each point
    marks: bool = False  # a mark with its interval at each point, and a thin line
    title: str = ""  # shown where the pointer rests


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took time, in seconds since the start of its chart."""

    start_s: float
    end_s: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The elements of a line chart other than its lines."""

    x_label: str
    y_label: str
    y_range: tuple[float, float] | None = None  # None: that of the points
    width: int = 760
    height: int = 300
    lines: Sequence[Line] = field(default_factory=tuple)


def colour_of(names: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each name."""
    return {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Returns round values from low to high, about `number` of them: ticks(0, 10) is [0, 2, 4, 6, 8, 10]."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Returns a number in few letters: 120000 as 120k, 0.00012 as 0.00012."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def line_chart(chart: Chart) -> str:
    """Returns lines, their intervals as shades and marks as dots with whiskers; "" where there are no points."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [y for line in lines for pair in line.intervals for y in pair]
    low, high = chart.y_range or _padded(min(ys), max(ys))
    plot = _Plot(chart, min(0.0, *xs), max(max(xs), min(0.0, *xs) + 1e-9), low, high)
    drawn = [*plot.axes(), *(part for line in lines for part in plot.line(line))]
    legend = "".join(
        f'<span><i style="background:{line.colour}"></i>{escape(line.label)}</span>' for line in lines if line.label
    )
    return f'{_svg(chart.width, chart.height, drawn, chart.y_label)}<div class="legend">{legend}</div>'


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


class _Plot:
    """Places points of a chart on its picture."""

    def __init__(self, chart: Chart, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self.chart = chart
        self.bounds = x_low, x_high, y_low, y_high

    def at(self, x: float, y: float) -> tuple[float, float]:
        x_low, x_high, y_low, y_high = self.bounds
        width, height = self.chart.width - _LEFT - _RIGHT, self.chart.height - _TOP - _BOTTOM
        inside = min(max((y - y_low) / (y_high - y_low), 0.0), 1.0)
        return _LEFT + width * (x - x_low) / (x_high - x_low), _TOP + height * (1 - inside)

    def axes(self) -> list[str]:
        x_low, x_high, y_low, y_high = self.bounds
        drawn = []
        for value in ticks(y_low, y_high):
            (left, y), (right, _) = self.at(x_low, value), self.at(x_high, value)
            drawn.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            drawn.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
        bottom = self.at(x_low, y_low)[1]
        for value in ticks(x_low, x_high):
            x = self.at(value, y_low)[0]
            drawn.append(f'<path class="grid" d="M{x:.1f} {bottom:.1f}v4"/>')
            drawn.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{short(value)}</text>')
        middle, end = self.at((x_low + x_high) / 2, y_low)[0], self.chart.height - 3
        drawn.append(f'<text x="{middle:.1f}" y="{end}" text-anchor="middle">{escape(self.chart.x_label)}</text>')
        turned = f"translate(11 {(_TOP + bottom) / 2:.1f}) rotate(-90)"
        return [*drawn, f'<text transform="{turned}" text-anchor="middle">{escape(self.chart.y_label)}</text>']

    def line(self, line: Line) -> list[str]:
        points = [self.at(x, y) for x, y in line.points]
        ends = [(self.at(x, low), self.at(x, high)) for (x, _), (low, high) in zip(line.points, line.intervals)]  # noqa: B905  # without intervals there are none
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        title = f"<title>{escape(line.title or line.label)}</title>"
        width = 0.8 if line.marks else 2
        drawn = [f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="{width}">{title}</path>']
        if len(points) == 1 and not line.marks:  # a path of one point is not drawn
            drawn.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{line.colour}"/>')
        if not line.marks:
            around = [*(high for _, high in ends), *(low for low, _ in reversed(ends))]
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in around)
            shade = f'<polygon points="{corners}" fill="{line.colour}" fill-opacity="0.16"/>'
            return [shade, *drawn] if ends else drawn
        for (x, low), (_, high) in ends:
            drawn.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{line.colour}" stroke-width="1.5"/>')
        return drawn + [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}">{title}</circle>' for x, y in points
        ]


def time_bars(rows: Mapping[str, Sequence[Bar]], length_s: float, width: int = 760) -> str:
    """Returns a Gantt chart: a row per name, bars in seconds from 0 to `length_s`, which several charts may share."""
    span = width - _LABELS - _RIGHT
    at = lambda seconds: _LABELS + span * seconds / max(length_s, 1e-9)  # noqa: E731
    drawn, bottom = [], 4 + _ROW * len(rows)
    for value in ticks(0.0, length_s):
        drawn.append(f'<path class="grid" d="M{at(value):.1f} 4V{bottom + 4}"/>')
        drawn.append(f'<text x="{at(value):.1f}" y="{bottom + 17}" text-anchor="middle">{short(value)} s</text>')
    for k, (name, bars) in enumerate(rows.items()):
        top = 4 + _ROW * k
        drawn.append(f'<text x="{_LABELS - 8}" y="{top + 13}" text-anchor="end">{escape(name)}</text>')
        for bar in bars:
            wide = max(at(bar.end_s) - at(bar.start_s), 0.4)
            place = f'x="{at(bar.start_s):.1f}" y="{top + 2}" width="{wide:.1f}" height="{_ROW - 4}"'
            drawn.append(f'<rect {place} fill="{bar.colour}"><title>{escape(bar.title)}</title></rect>')
    return _svg(width, bottom + 24, drawn, "what ran when")


def _svg(width: int, height: int, parts: Sequence[str], label: str) -> str:
    inside = "".join(parts)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{inside}</svg>'
