"""Trains twice, once undisturbed and once while workers are killed, stopped and made to fail, and compares the weights.

python experiments/chaos.py workflow=embodied faults=20 seed=7 run.dir=runs/chaos
python experiments/chaos.py workflow=reasoning faults=20 seed=7 run.dir=runs/chaos

A schedule drawn from the seed says which worker fails in which phase (rlinf_embodied/tools/chaos.py).  Other keys are
those of the training, for example plan=collocated.  Exit code 0: all faults occurred, and the weights are the same, bit
for bit; 1: otherwise; 2: wrong input.
"""

from typing import Any, cast

from rlinf_embodied.command_line import main
from rlinf_embodied.tools.chaos import Options, compare, compose_chaos

if __name__ == "__main__":
    main(lambda config: int(not compare(config).passed), cast(Any, Options), compose_chaos)
