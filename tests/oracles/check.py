"""Compares the OpenVLA networks with goldens of the reference code, and says for each by how much they differ.

python -m tests.oracles.check folder=<oracle>              checkpoint/ and golden/, or several folders with these
python -m tests.oracles.check folder=<oracle> limit=1e-3   of a float32 golden; 1e-4 if it is not given

Beside such folders, it takes pictures (golden.npz, made from the pictures of an openvla/ folder next to it) and key
lists of the full size (openvla_7b_keys.json).  A difference is that of the two worst values, divided by the largest
value of the golden; tokens must be equal.  Exit codes: 0 all are within the limit, 1 one is not, 2 wrong input.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.command_line import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    folder: str
    limit: float = 1e-4


def check(own: Options) -> int:
    from tests.oracles.folders import check_folders  # imports torch

    return check_folders(Path(own.folder), own.limit)


if __name__ == "__main__":
    main(check, Options)
