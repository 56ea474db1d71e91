"""Trains a language model on verifiable mathematics: fine-tuning, then reinforcement learning by GRPO or PPO.

python experiments/train_llm_math.py run.dir=runs/math
python experiments/train_llm_math.py algorithm=ppo data=chains run.seed=1
python experiments/train_llm_math.py algorithm=sft                            # fine-tuning alone
"""

from rlinf_embodied import train
from rlinf_embodied.command_line import STARTED, main
from rlinf_embodied.config import MathConfig

if __name__ == "__main__":
    main(lambda config: train(config, STARTED), MathConfig)
