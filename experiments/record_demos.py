"""Records demonstrations of the scripted expert, or of a teacher, for warm_start.demonstrations=<out>.

python experiments/record_demos.py env=maniskill_pick out=runs/pick.h5               actions and seeds, for replay
python experiments/record_demos.py env=maniskill_pick out=runs/pick_lerobot          a LeRobot v3 folder, with images
python experiments/record_demos.py env=maniskill_push out=runs/push.h5 warm_start.teacher=<dir>    those of a teacher

The other keys are those of train_vla.py; warm_start.num_demos says how many episodes are run, and those that solve the
task are written, undisturbed (warm_start.noise is for cloning).
"""

import sys
from pathlib import Path

from rlinf_embodied.command_line import train_main
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import ConfigError


def record(config: TrainConfig) -> None:
    from rlinf_embodied.embodied.record import record_demonstrations  # imports torch
    from rlinf_embodied.embodied.warm_start_source import require_source

    if OUT is None:
        raise ConfigError("out is missing, but the demonstrations go somewhere: give out=<file>.h5 or out=<new folder>")
    require_source(config)
    number = record_demonstrations(config, OUT, lambda done, total: print(f"episodes {done}/{total}", flush=True))
    print(f"{number} demonstrations in {OUT}")


if __name__ == "__main__":
    given = [text for text in sys.argv if text.startswith("out=")]
    OUT = Path(given[-1].removeprefix("out=")) if given else None
    sys.argv = [text for text in sys.argv if text not in given]
    train_main(record)
