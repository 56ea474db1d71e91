"""Trains a language model on verifiable mathematics by reinforcement learning: fine-tuning, GRPO or PPO, a curve.

python experiments/train_llm_math.py run.dir=runs/math
python experiments/train_llm_math.py algorithm=ppo data=linear run.seed=1
"""

import time

STARTED = time.time()  # of the command: imports count

from rlinf_embodied.command_line import math_main  # noqa: E402
from rlinf_embodied.config import MathConfig  # noqa: E402


def train(config: MathConfig) -> int:
    # these import torch: only once the input is known to be right
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.training.trainer import Trainer

    return Trainer(ReasoningJob(config), started=STARTED).run()


if __name__ == "__main__":
    math_main(train)
