"""Fine-tunes a policy on demonstrations: ManiSkill trajectory files and LeRobot v3 folders, your own rollouts included.

python experiments/train_sft.py env=maniskill_pick data=runs/pick.h5 run.dir=runs/sft
python experiments/train_sft.py env=maniskill_pick data=runs/pick.h5,runs/more.h5 sft.checkpoint=<dir> run.dir=runs/sft
"""

from rlinf_embodied import train
from rlinf_embodied.command_line import STARTED, main
from rlinf_embodied.config import ImitationConfig

if __name__ == "__main__":
    main(lambda config: train(config, STARTED), ImitationConfig)
