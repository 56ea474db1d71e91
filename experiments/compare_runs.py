"""Compares finished runs of one workflow: a Markdown table and a picture of their learning curves.

python experiments/compare_runs.py runs=runs/seed0,runs/seed1,runs/seed2 [out=runs/compared]

writes runs/compared.md and runs/compared.png.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.side_by_side import write
from rlinf_embodied.words import exit_code, names_of, parse_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    runs: str = ""  # run folders, joined by commas
    out: str = "runs/compared"


def main(words: Sequence[str]) -> int:
    own = parse_all(Options, words, "compare_runs")
    folders = names_of(own.runs)
    if not folders:
        raise ConfigError("runs is empty, but runs are to be compared: use runs=runs/seed0,runs/seed1")
    print(write(Path(own.out), [Path(folder) for folder in folders]))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
