"""Tables: aligned columns of text for terminals and log files, and Markdown for pages."""

from __future__ import annotations

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


def described_table(rows: Sequence[Mapping[str, str]], long: Sequence[str], title: str = "") -> str:
    """Returns numbered rows as a table of their short columns; `long` names those that get a line below each row."""
    short = [{"#": str(k + 1)} | {key: row[key] for key in row if key not in long} for k, row in enumerate(rows)]
    head, *lines = text_table(short).splitlines()
    label, indent = max(map(len, long)), " " * (len(str(len(rows))) + 2)
    printed = [*([title] if title else []), head, *lines[:1]]
    for line, row in zip(lines[1:], rows, strict=True):
        printed += [line, *(f"{indent}{name:<{label}}  {row[name]}".rstrip() for name in long)]
    return "\n".join(printed)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns rows below a header in Markdown; bars within cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
