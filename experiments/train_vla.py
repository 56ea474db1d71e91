"""Trains a vision-language-action policy by reinforcement learning: demonstrations, cloning, PPO or GRPO, videos.

python experiments/train_vla.py env=maniskill_pick policy=tiny_vla algorithm=ppo plan=collocated run.dir=runs/mine
"""

import time

STARTED = time.time()  # of the command: imports count

from rlinf_embodied.command_line import train_main  # noqa: E402
from rlinf_embodied.config import TrainConfig  # noqa: E402


def train(config: TrainConfig) -> int:
    # these import torch: only once the input is known to be right
    from rlinf_embodied.embodied.job import EmbodiedJob
    from rlinf_embodied.training.trainer import Trainer

    return Trainer(EmbodiedJob(config), started=STARTED).run()


if __name__ == "__main__":
    train_main(train)
