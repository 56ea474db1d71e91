"""Trains a vision-language-action policy: behaviour cloning of demonstrations, then reinforcement learning.

python experiments/train_vla.py env=maniskill_pick policy=tiny_vla algorithm=ppo plan=collocated run.dir=runs/mine
python experiments/train_vla.py env=point_reach run.seeds=0-4 run.dir=runs/toy  # a run per seed, and a page of all
"""

import sys
from collections.abc import Sequence

from rlinf_embodied import begin_workers, train
from rlinf_embodied.command_line import STARTED, main
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.starting_point import require_start


def compose_startable(words: Sequence[str]) -> TrainConfig:
    """Returns the config, after a check that the training has something to start from."""
    config = compose_train(words, begin=begin_workers)
    require_start(config)
    return config


if __name__ == "__main__":
    if any(word.startswith("run.seeds=") for word in sys.argv):
        from rlinf_embodied.reporting.seeds import run_seeds  # numpy, which a run imports once it is pinned

        main(run_seeds, list, lambda words: list(words))
    main(lambda config: train(config, STARTED), TrainConfig, compose_startable)
