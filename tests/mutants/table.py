"""The mutants of table.txt.

= the file that is changed, of all mutants below
name @ the test that has to fail
- its text, which occurs once; a name may have several such lines
+ the text in its place; without such a line it is left out
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_ENTRY = re.compile(r"(?:^= (.+)\n)?^([^-+=#\n].*) @ (.+)\n((?:^- .*\n)+)((?:^\+ .*\n)*)", re.MULTILINE)


class Mutant(NamedTuple):
    """A textual replacement in a file, with which a test has to fail."""

    file: str
    name: str
    test: str  # its node id
    old: str
    new: str


def mutants() -> list[Mutant]:
    """Returns all mutants in their order."""
    found, file = [], ""
    for named, name, test, old, new in _ENTRY.findall((ROOT / "tests/mutants/table.txt").read_text()):
        file = named or file
        found.append(Mutant(file, name, test, *("\n".join(s[2:] for s in part.splitlines()) for part in (old, new))))
    return found
