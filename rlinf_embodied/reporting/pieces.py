"""Small pieces of HTML that all sections are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rlinf_embodied.reporting.drawings import short
from rlinf_embodied.telemetry.metrics import percent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are text."""
    cells = lambda row, tag: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def missing(why: str) -> str:
    """Returns a remark on what is not there."""
    return f'<p class="missing">Missing: {escape(why)}.</p>'


def folded(title: str, inside: str) -> str:
    """Returns what is shown on demand."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def share(result: Mapping[str, object], name: str) -> str:
    """Returns a rate with its interval and, where known, the number behind it; "-" where it was not measured."""
    if f"{name}_interval" not in result:
        return short(float(value)) if isinstance(value := result.get(name), int | float) else "-"
    number = result.get("num_episodes") or result.get("num_problems")
    return percent(result, name) + (f" of {number}" if number else "")
