"""Which task and which initial state a reset seed stands for.

    evaluation (seed < 2^30)   tasks take turns, then the benchmark's 50 initial states of each: 500 seeds in a row are
                               every pair of a suite of 10 tasks once
    training (seed >= 2^30)    a task by the seed, its objects placed by the task's own rules and drawn from the seed

Nothing but the standard library is imported: the processes that run LIBERO import this too.
"""

from __future__ import annotations

from collections.abc import Sequence

from envs.foreign.starts import FIRST_TRAINING_SEED, Start

NUM_TASKS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
NUM_STATES = 50  # initial states of every task that the benchmark comes with
NUM_OBJECTS = 4  # of a task's goal, whose places are told


def start_of(seed: int, tasks: Sequence[int], train_on_benchmark: bool = False) -> Start:
    """Returns the start that a reset seed stands for.

    Args:
        seed: the reset seed, not negative.
        tasks: the numbers of the tasks that take turns.
        train_on_benchmark: whether training seeds, too, stand for the benchmark's initial states.
    """
    turn, place = divmod(seed, len(tasks))
    drawn = seed >= FIRST_TRAINING_SEED and not train_on_benchmark
    return Start(tasks[place], None if drawn else turn % NUM_STATES, seed)
