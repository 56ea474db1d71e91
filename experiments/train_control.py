"""Trains a policy on transitions: soft actor-critic with a replay buffer, on any env that shows a state.

python experiments/train_control.py env=gymnasium env.id=Pendulum-v1 algorithm=sac run.dir=runs/pendulum
"""

from rlinf_embodied import train
from rlinf_embodied.command_line import STARTED, main
from rlinf_embodied.config import ControlConfig

if __name__ == "__main__":
    main(lambda config: train(config, STARTED), ControlConfig)
