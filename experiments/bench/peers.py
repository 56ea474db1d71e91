"""PPO here against PPO of Stable-Baselines3 on a MuJoCo task: env steps per second, rollout and update included.

python -m experiments.bench.peers [rounds=5] [iterations=2] [task=HalfCheetah-v5] [num_envs=8] [clock=processor]
                                  [out=docs/results/peers]

Both train 2 x 64 tanh units, actor and critic apart, on 2,048 env steps per iteration with the settings of
algorithm=ppo_mujoco (minibatches of 64, 10 epochs, Adam 3e-4), without standardised observations, in one process and
one thread each, in turn.  clock=processor counts seconds of processor time, which other work on the machine does not
add to; clock=wall counts what a watch shows, which is right on an idle machine only.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from experiments.bench.harness import Benchmark, Goal, Report, Run, Spread, Table, Timing, alternate, chosen, ratios
from experiments.bench.harness.trainings import in_this_process, iterations, starting_folder
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.errors import ConfigError

STEPS, MINIBATCH = 2048, 64  # env steps of an iteration and of a minibatch
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
_ROLLOUT = {"name": "rollout", "stages": {"env": "all", "policy": "all"}}
COLLOCATED = [{"tree": {"temporal": [{"loop": _ROLLOUT}, {"leaf": {"stage": "actor", "devices": "all"}}]}}]
Arm = Callable[[], Timing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    rounds: int = 5
    iterations: int = 2  # of each arm in a round
    task: str = "HalfCheetah-v5"
    num_envs: int = 8
    clock: str = "processor"
    out: str = ""


def our_config(task: str, num_envs: int) -> TrainConfig:
    """Returns the training that SB3's defaults describe."""
    config = compose_train(
        [
            *("env=gymnasium", f"env.id={task}", f"env.num_envs={num_envs}", f"env.block_size={num_envs}"),
            *(f"env.chunks_per_rollout={STEPS // num_envs}", "policy=actor_critic", "algorithm=ppo_mujoco"),
            *("algorithm.lr_end_fraction=1.0", f"algorithm.num_minibatches={STEPS // MINIBATCH}", "cluster=serial"),
            *("policy.options.normalize_observations=false", "policy.options.normalize_returns=false"),
        ]
    )
    return replace(config, warm_start=replace(config.warm_start, cache_dir=tempfile.mkdtemp(prefix="peers-")))


@contextmanager
def ours(task: str, num_envs: int, count: int, clock: Callable[[], float]) -> Iterator[Arm]:
    """Yields what runs `count` iterations of this project's PPO."""
    config = our_config(task, num_envs)
    job = EmbodiedJob(config)
    workflow = job.workflow(starting_folder(config, in_process=True))
    with in_this_process(workflow, COLLOCATED) as executor:
        steps = iterations(job, executor, sys.maxsize)

        def run() -> Timing:
            start = clock()
            done = sum(int(next(steps)[1]["rollout/env_steps"]) for _ in range(count))
            return Timing(clock() - start, done)

        yield run


def sb3(task: str, num_envs: int, count: int, clock: Callable[[], float]) -> Arm:
    """Returns what runs `count` iterations of SB3's PPO with its defaults, on rows in this process."""
    model = PPO(
        "MlpPolicy",
        make_vec_env(task, num_envs, seed=0),
        n_steps=STEPS // num_envs,
        batch_size=MINIBATCH,
        device="cpu",
        seed=0,
    )

    def run() -> Timing:
        start, before = clock(), model.num_timesteps
        model.learn(count * STEPS, reset_num_timesteps=False)
        return Timing(clock() - start, model.num_timesteps - before)

    return run


def measure(run: Run[Options]) -> Report:
    """Lets both take turns.

    Raises:
        ConfigError: an unknown clock, or rows that do not divide an iteration.
    """
    own = run.options
    (clock,) = chosen(own.clock, CLOCKS, "clock").values()
    if own.num_envs < 1 or STEPS % own.num_envs:
        raise ConfigError(f"num_envs is {own.num_envs}, but an iteration has {STEPS} env steps: use a divisor, as 8")
    torch.set_num_threads(1)
    with ours(own.task, own.num_envs, own.iterations, clock) as ours_arm:
        arms = {"ours": ours_arm, "sb3": sb3(own.task, own.num_envs, own.iterations, clock)}
        timings = alternate(arms, own.rounds, warm_up=1)
    speed = {name: [timing.rate for timing in several] for name, several in timings.items()}
    ratio = Goal("ours / SB3", ratios(speed["ours"], speed["sb3"]), 1.5, floor=1.0)
    rows = [(name, f"{Spread.of(values):.0f}") for name, values in speed.items()]
    table = Table((f"{own.task}, {own.num_envs} rows", f"env steps/s ({own.clock}), median (min-max)"), rows)
    content = {"env_steps_per_s": {name: Spread.of(values) for name, values in speed.items()}, "goals": [ratio]}
    return Report(content=content, text=f"{table}\n\n{ratio}")


BENCHMARK = Benchmark("peers", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
