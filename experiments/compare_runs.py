"""Puts finished runs side by side: a Markdown table and one picture of their learning curves.

python experiments/compare_runs.py runs/compared runs/seed0 runs/seed1 runs/seed2

writes runs/compared.md and runs/compared.png.  All runs are of one workflow: VLAs, or language models.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf_embodied.words import exit_code

from rlinf_embodied.reporting.side_by_side import write


def main(words: Sequence[str]) -> int:
    target, *folders = map(Path, words)
    print(write(target, folders))
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(exit_code(main))
