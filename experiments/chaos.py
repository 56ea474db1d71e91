"""Trains twice, once undisturbed and once while workers are killed, stopped and made to fail, and compares the weights.

python experiments/chaos.py workflow=embodied faults=20 seed=7 run.dir=runs/chaos
python experiments/chaos.py workflow=reasoning faults=20 seed=7 run.dir=runs/chaos

A schedule drawn from the seed says which worker fails in which phase (rlinf_embodied/tools/chaos.py).  Other keys are
those of the training, for example plan=collocated.  Exit code 0: all faults occurred, and the weights are the same, bit
for bit; 1: otherwise; 2: wrong input.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rlinf_embodied.command_line import main
from rlinf_embodied.compose import Prepare, split
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.tools.chaos import Options, compare, configure


def request(words: Sequence[str], prepare: Prepare) -> tuple[Options, list[str], Path]:
    """Returns the options, the overrides of the training and the folder."""
    own, overrides = split(Options, words)
    folders = [text.removeprefix("run.dir=") for text in overrides if text.startswith("run.dir=")]
    root = Path(folders[-1] if folders else "runs/chaos") / f"{own.workflow}-{own.seed}"
    overrides = [text for text in overrides if not text.startswith("run.dir=")]
    configure(own, overrides, root, prepare)  # wrong input is reported before anything starts
    if root.exists():
        raise ConfigError(f"run.dir has {root}, of an earlier comparison: use another run.dir, or remove it")
    return own, overrides, root


if __name__ == "__main__":
    main(cast(Any, lambda asked: compare(*asked)), Options, cast(Any, request))
