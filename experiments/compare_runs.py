"""Compares finished runs: a Markdown table and one picture of their learning curves.

python experiments/compare_runs.py runs=runs/seed0,runs/seed1,runs/seed2 out=runs/compared

writes runs/compared.md and runs/compared.png.  All runs are of one workflow: VLAs, or language models.
"""

from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.compose import names_of
from rlinf_embodied.reporting.side_by_side import write


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is compared."""

    runs: str  # run folders, joined by commas
    out: str  # without a suffix


def compare(options: Options) -> None:
    print(write(Path(options.out), [Path(name) for name in names_of(options.runs)]))


if __name__ == "__main__":
    main(compare, Options)
