"""Trains a policy on transitions: soft actor-critic with a replay buffer, on any env that shows a state.

python experiments/train_control.py env=gymnasium env.id=Pendulum-v1 algorithm=sac run.dir=runs/pendulum
"""

import time

STARTED = time.time()  # of the command: imports count

from rlinf_embodied.command_line import control_main  # noqa: E402
from rlinf_embodied.config import ControlConfig  # noqa: E402


def train(config: ControlConfig) -> int:
    # these import torch: only once the input is known to be right
    from rlinf_embodied.control.job import ControlJob
    from rlinf_embodied.training.trainer import Trainer

    return Trainer(ControlJob(config), started=STARTED).run()


if __name__ == "__main__":
    control_main(train)
