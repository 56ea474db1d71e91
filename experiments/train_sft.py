"""Fine-tunes a policy on demonstrations: ManiSkill trajectory files and LeRobot v3 folders, rollouts of one's own too.

python experiments/train_sft.py env=maniskill_pick data=runs/pick.h5 run.dir=runs/sft
python experiments/train_sft.py env=maniskill_pick data=runs/pick.h5,runs/more.h5 sft.checkpoint=<dir> run.dir=runs/sft
"""

import time

STARTED = time.time()  # of the command: imports count

from rlinf_embodied.command_line import sft_main  # noqa: E402
from rlinf_embodied.config import ImitationConfig  # noqa: E402


def train(config: ImitationConfig) -> int:
    # these import torch: only once the input is known to be right
    from rlinf_embodied.embodied.imitation_job import ImitationJob
    from rlinf_embodied.training.trainer import Trainer

    return Trainer(ImitationJob(config), started=STARTED).run()


if __name__ == "__main__":
    sft_main(train)
