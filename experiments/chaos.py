"""Trains twice, once undisturbed and once while workers are killed, stopped and made to fail, and compares the weights.

python experiments/chaos.py workflow=embodied faults=20 seed=7 run.dir=runs/chaos [nodes=1]
python experiments/chaos.py workflow=reasoning faults=20 seed=7 run.dir=runs/chaos [nodes=1]

A schedule drawn from the seed says what happens to whom, and in which phase (rlinf_embodied/chaos/); the next fault
comes when the one before is mended.  With nodes=2 the disturbed run has two Ray nodes, and the last fault is the end of
one of them.  Other keys are those of the training, for example plan=collocated.  Exit code 0: all faults came, and the
weights are the same, bit for bit; 1: not so; 2: wrong input.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf_embodied.chaos.settings import Options, configure, pinned
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.words import exit_code, parse


def main(words: Sequence[str]) -> int:
    own, overrides = parse(Options, words)
    folders = [text.removeprefix("run.dir=") for text in overrides if text.startswith("run.dir=")]
    root = Path(folders[-1] if folders else "runs/chaos") / f"{own.workflow}-{own.seed}"
    overrides = [text for text in overrides if not text.startswith("run.dir=")]
    configure(own, overrides, root)  # wrong input is told before torch is imported
    if root.exists():
        raise ConfigError(f"run.dir has {root}, of an earlier comparison: use another run.dir, or remove it")
    overrides = pinned(overrides)
    from rlinf_embodied.chaos.comparison import compare  # imports torch, which must find the pins

    return compare(own, overrides, root)


if __name__ == "__main__":
    sys.exit(exit_code(main))
