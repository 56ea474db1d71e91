"""Trains a vision-language-action policy: behaviour cloning of demonstrations, then reinforcement learning.

python experiments/train_vla.py env=maniskill_pick policy=tiny_vla algorithm=ppo plan=collocated run.dir=runs/mine
"""

from collections.abc import Sequence

from rlinf_embodied import begin_workers, train
from rlinf_embodied.command_line import STARTED, main
from rlinf_embodied.compose import compose
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.starting_point import require_start


def compose_startable(words: Sequence[str]) -> TrainConfig:
    """Returns the config, after a check that the training has something to start from."""
    config = compose(TrainConfig, words, begin=begin_workers)
    require_start(config)
    return config


if __name__ == "__main__":
    main(lambda config: train(config, STARTED), TrainConfig, compose_startable)
