"""Tables: aligned columns of text for terminals and log files, and Markdown for pages."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence


def text_table(rows: Sequence[Mapping[str, str]], title: str = "") -> str:
    """Returns rows of the same columns with a header, each column as wide as its longest cell; "" for no rows."""
    if not rows:
        return title
    columns = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    line = lambda row: "  ".join(row[name].ljust(widths[name]) for name in columns).rstrip()  # noqa: E731
    head = line({name: name for name in columns})
    return "\n".join([*([title] if title else []), head, "-" * len(head), *map(line, rows)])


def described_table(
    rows: Sequence[Mapping[str, str]], long: Sequence[str], title: str = "", width: int | None = None
) -> str:
    """Returns numbered rows as a table of their short columns; below each row, what is too long for a column.

    Args:
        rows: of the same columns.
        long: names of the columns that get a separate line.
        title: above the table.
        width: at which these lines are wrapped, in letters; None: they are not.
    """
    numbered = [{"#": str(k + 1), **row} for k, row in enumerate(rows)]
    short = [{name: text for name, text in row.items() if name not in long} for row in numbered]
    head, *lines = text_table(short).splitlines()
    label, indent = max(map(len, long)), " " * (len(str(len(rows))) + 2)
    printed = [*([title] if title else []), head, *lines[:1]]
    for line, row in zip(lines[1:], rows, strict=True):
        printed.append(line)
        printed += [wrapped(f"{indent}{name:<{label}}  ", row[name], width) for name in long]
    return "\n".join(printed)


def wrapped(head: str, text: str, width: int | None) -> str:
    """Returns text behind a head, further lines below the text's beginning; None: one line, however long."""
    if width is None:
        return f"{head}{text}".rstrip()
    room = max(width, len(head) + 20)
    return textwrap.fill(
        text,
        room,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def terminal_width() -> int | None:
    """Returns the columns of the terminal that standard output is, None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns rows below a header in Markdown; bars within cells stay in their cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
