"""Trains twice, once undisturbed and once while workers are killed, stopped and made to fail, and compares the weights.

python experiments/chaos.py workflow=embodied faults=20 seed=7 run.dir=runs/chaos [nodes=1]
python experiments/chaos.py workflow=reasoning faults=20 seed=7 run.dir=runs/chaos [nodes=1]

A schedule drawn from the seed says what happens to whom, and in which phase (rlinf_embodied/chaos/); the next fault
comes when the one before is mended.  With nodes=2 the disturbed run has two Ray nodes, and the last fault is the end of
one of them.  Other keys are those of the training, for example plan=collocated.  Exit code 0: all faults came, and the
weights are the same, bit for bit; 1: not so; 2: wrong input.
"""

from collections.abc import Sequence
from pathlib import Path

from rlinf_embodied.chaos.settings import Options, configure, pinned
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import split
from rlinf_embodied.errors import ConfigError


def request(words: Sequence[str]) -> tuple[Options, list[str], Path]:
    """Returns the options, the overrides of the training and the folder."""
    own, overrides = split(Options, words)
    folders = [text.removeprefix("run.dir=") for text in overrides if text.startswith("run.dir=")]
    root = Path(folders[-1] if folders else "runs/chaos") / f"{own.workflow}-{own.seed}"
    overrides = [text for text in overrides if not text.startswith("run.dir=")]
    configure(own, overrides, root)  # wrong input is reported before torch is imported
    if root.exists():
        raise ConfigError(f"run.dir has {root}, of an earlier comparison: use another run.dir, or remove it")
    return own, pinned(overrides), root


def compare_runs(asked: tuple[Options, list[str], Path]) -> int:
    from rlinf_embodied.chaos.comparison import compare  # imports torch, which must find the pins

    return compare(*asked)


if __name__ == "__main__":
    main(compare_runs, Options, request)
