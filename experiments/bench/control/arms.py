"""Processor seconds of training, ours and Stable-Baselines3's; imports nothing that computes before it is pinned.

An iteration gathers env.num_envs x env.chunks_per_rollout env steps and makes its updates; the ones before the first
update are not counted.  Both arms are one process on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import cast

from experiments.bench.harness import Worker, alternate
from rlinf_embodied import portable
from rlinf_embodied.config import TrainConfig

_LOOP = {"name": "rollout", "stages": {"env": "all", "policy": "all"}}
_LEAVES = [{"leaf": {"stage": stage, "devices": "all"}} for stage in ("replay", "actor")]
ALONE = [{"tree": {"temporal": [{"loop": _LOOP}, *_LEAVES]}}]


class Ours:
    """Our training, under the collocated plan on one device of this process."""

    def __init__(self, config: TrainConfig) -> None:
        """Makes the stages and takes all steps before the first update, and one iteration more."""
        if config.run.exact.value == "portable":
            portable.pin()
        import torch

        torch.set_num_threads(1)
        from experiments.bench.harness.trainings import in_this_process, iterations, one_device
        from rlinf_embodied.embodied.job import EmbodiedJob
        from rlinf_embodied.runtime.session import SerialSession

        job = EmbodiedJob(config)
        folder = str(job.starting_policy(SerialSession(), one_device(), lambda *progress: None))
        self._inside = in_this_process(job.workflow(folder), ALONE)
        self._steps = iterations(job, self._inside.__enter__(), 10**9)
        self.seconds(config.algorithm.typical_iteration(config.env) + 1)

    def seconds(self, count: int) -> float:
        """Runs so many iterations and returns the processor seconds that they took."""
        start = time.process_time()
        for _ in range(count):
            next(self._steps)
        return time.process_time() - start


class Theirs:
    """The peer's."""

    def __init__(self, config: TrainConfig) -> None:
        import torch

        torch.set_num_threads(1)
        from experiments.bench.control.peer import soft_actor_critic

        self._model, self._size = (
            soft_actor_critic(config, config.run.seed),
            config.env.num_envs * config.env.chunks_per_rollout,
        )
        self.seconds(config.algorithm.typical_iteration(config.env) + 1)

    def seconds(self, count: int) -> float:
        start = time.process_time()
        self._model.learn(count * self._size, reset_num_timesteps=False)
        return time.process_time() - start


def speeds(config: TrainConfig, rounds: int, iterations: int) -> dict[str, list[float]]:
    """Returns env steps per processor second of both, round by round."""
    from experiments.bench.control.peer import steps_per_iteration

    workers: Sequence[Worker] = [Worker(arm, config) for arm in (Ours, Theirs)]
    steps = iterations * steps_per_iteration(config)

    def speed(worker: Worker) -> float:
        return steps / cast(float, worker.ask("seconds", iterations).answer())

    def say(number: int, name: str, found: float) -> None:
        print(f"round {number + 1}, {name}: {found:.1f} env steps per processor second", flush=True)

    try:
        return alternate(
            {n: partial(speed, w) for n, w in zip(("ours", "sb3"), workers, strict=True)}, rounds, said=say
        )
    finally:
        for worker in workers:
            worker.close()
