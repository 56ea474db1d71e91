"""Small pieces of HTML that all sections are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rlinf_embodied.telemetry.metrics import percent
from rlinf_embodied.telemetry.plots import svg
from rlinf_embodied.telemetry.run_reader import SHARES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are text."""
    cells = lambda row, tag: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def missing(why: str) -> str:
    """Returns a remark on what is missing."""
    return f'<p class="missing">Missing: {escape(why)}.</p>'


def folded(title: str, inside: str) -> str:
    """Returns content that a click unfolds."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def drawn(figure: Figure | None, title: str) -> str:
    """Returns a plot; nothing where there was nothing to draw."""
    return "" if figure is None else f"<figure>{svg(figure, escape(title))}</figure>"


def measured(result: Mapping[str, Any], name: str) -> str:
    """Returns a metric with its 95 % interval and, if known, the number of trials; "-" if it was not measured."""
    value, interval = result.get(name), result.get(f"{name}_interval")
    if not isinstance(value, int | float):
        return "-"
    if interval is None:
        return value_of(name, value)
    number = result.get("num_episodes") or result.get("num_problems")
    text = percent(result, name) if name in SHARES else f"{value:.4g} [{interval[0]:.4g}, {interval[1]:.4g}]"
    return text + (f" of {number}" if number else "")


def value_of(name: str, value: float | None) -> str:
    """Returns the value of a metric in its unit; "-" without a value."""
    return "-" if value is None else f"{100 * value:.1f} %" if name in SHARES else f"{value:.4g}"
