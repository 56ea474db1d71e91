"""Our PPO and Stable-Baselines3's on a MuJoCo task, and SB3's on our batched ManiSkill: env steps per second.

python -m experiments.bench.sb3 [cases=mujoco,state,images] [rounds=5] [iterations=2] [compile=true]
                                [out=docs/results/sb3.json]

    mujoco         our PPO and SB3's train an actor and a critic of 2 x 64 tanh units on 2,048 env steps an iteration
                   of HalfCheetah-v5 with the settings of algorithm=ppo_mujoco (minibatches of 64, 10 epochs, Adam
                   3e-4), without standardised observations, on 8 rows; compile: see algorithm.compile
    state, images  SB3's PPO trains on PickCube through envs.sb3.make_sb3, and on ManiSkill's single CPU envs with
                   its CPUGymWrapper in SB3's DummyVecEnv: 512 env steps an iteration, minibatches of 128, 4 epochs, on
                   32 rows; on the state, or on one camera of 64 x 64 pixels and the robot's own state.  An episode
                   ends when the task is solved, or after 50 steps

Arms alternate in one process with one thread.  Seconds are of processor time, to which other work on the machine does
not add.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from experiments.bench.harness import Benchmark, Goal, Report, Run, Spread, Table, Timing, alternate, chosen, ratios
from experiments.bench.harness.trainings import COLLOCATED, in_this_process, iterations, starting_folder
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.job import EmbodiedJob

HORIZON, CONTROL, PIXELS = 50, "pd_joint_delta_pos", 64  # of ManiSkill's rows
MINIBATCH = 64  # env steps of PPO's minibatches on MuJoCo
Arm = Callable[[], Timing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""
    rounds: int = 5
    iterations: int = 2  # of each arm in a round
    compile: bool = True
    out: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Two arms that alternate."""

    task: str
    num_envs: int
    steps: int  # env steps of an iteration
    goal: float
    floor: float | None = None


CASES = {
    "mujoco": Case("HalfCheetah-v5", 8, 2048, 1.5, floor=1.0),
    "state": Case("PickCube-v1", 32, 512, 1.8),
    "images": Case("PickCube-v1", 32, 512, 5.0),
}


# --------------------------------------------------------------------------------------------------------------- mujoco
def our_config(case: Case, compile: bool) -> TrainConfig:
    """Returns the training that SB3's defaults describe, its passes compiled or not."""
    words = [
        *("env=gymnasium", f"env.id={case.task}", f"env.num_envs={case.num_envs}", f"env.block_size={case.num_envs}"),
        *(f"env.chunks_per_rollout={case.steps // case.num_envs}", "policy=actor_critic", "algorithm=ppo_mujoco"),
        *("algorithm.lr_end_fraction=1.0", f"algorithm.num_minibatches={case.steps // MINIBATCH}", "cluster=serial"),
        *("policy.options.normalize_observations=false", "policy.options.normalize_returns=false"),
        *("algorithm.value_clip=null", "algorithm.value_coef=1.0"),  # as SB3 has them
        *("run.exact=exact", f"algorithm.compile={str(compile).lower()}"),
    ]
    config = compose_train(words)
    return replace(config, warm_start=replace(config.warm_start, cache_dir=tempfile.mkdtemp(prefix="sb3-")))


@contextmanager
def mujoco(case: Case, count: int, compile: bool) -> Iterator[dict[str, Arm]]:
    """Yields `count` iterations of this project's PPO, and of SB3's with its defaults on rows in this process."""
    from stable_baselines3.common.env_util import make_vec_env

    config = our_config(case, compile)
    job = EmbodiedJob(config)
    with in_this_process(job.workflow(starting_folder(config, in_process=True)), COLLOCATED) as executor:
        steps = iterations(job, executor, sys.maxsize)

        def ours() -> Timing:
            start = time.process_time()
            done = sum(int(next(steps)[1]["rollout/env_steps"]) for _ in range(count))
            return Timing(time.process_time() - start, done)

        env = make_vec_env(case.task, case.num_envs, seed=0)
        yield {"ours": ours, "sb3": learning("MlpPolicy", env, case, count, batch_size=MINIBATCH)}


def learning(policy: str, env: Any, case: Case, count: int, **settings: Any) -> Arm:
    """Returns what runs `count` iterations of SB3's PPO."""
    from stable_baselines3 import PPO

    model = PPO(policy, env, device="cpu", seed=0, n_steps=case.steps // case.num_envs, **settings)

    def run() -> Timing:
        start, before = time.process_time(), model.num_timesteps
        model.learn(count * case.steps, reset_num_timesteps=False)
        return Timing(time.process_time() - start, model.num_timesteps - before)

    return run


# ------------------------------------------------------------------------------------------------------------ ManiSkill
def stock_row(task: str, with_images: bool, seed: int) -> Any:
    """Returns one stock env as SB3 takes it."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  registers the tasks
    from mani_skill.utils.wrappers.flatten import FlattenRGBDObservationWrapper
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
    from stable_baselines3.common.monitor import Monitor

    plain = {"num_envs": 1, "sim_backend": "physx_cpu", "reward_mode": "normalized_dense", "control_mode": CONTROL}
    if with_images:
        sizes = {"width": PIXELS, "height": PIXELS}
        env = FlattenRGBDObservationWrapper(gymnasium.make(task, obs_mode="rgb", sensor_configs=sizes, **plain))
    else:
        env = gymnasium.make(task, obs_mode="state", render_backend="none", **plain)
    row = Monitor(CPUGymWrapper(env, record_metrics=False))
    row.reset(seed=seed)
    return row


def stock(task: str, num_envs: int, with_images: bool) -> Any:
    """Returns the rows as SB3 makes them of single envs, in one process."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([partial(stock_row, task, with_images, row) for row in range(num_envs)])


def batched(task: str, num_envs: int, with_images: bool) -> Any:
    """Returns the rows of one env object of ours."""
    from envs.sb3 import make_sb3

    shown: dict[str, Any] = {"cameras": ["base_camera"], "obs_size": PIXELS} if with_images else {}
    observations = "dict" if with_images else "state"
    return make_sb3(task, num_envs, observations=observations, horizon=HORIZON, control_mode=CONTROL, **shown)


@contextmanager
def maniskill(case: Case, count: int, with_images: bool) -> Iterator[dict[str, Arm]]:
    """Yields `count` iterations of SB3's PPO on stock envs and on ours."""
    policy = "MultiInputPolicy" if with_images else "MlpPolicy"
    settings = {"batch_size": 128, "n_epochs": 4, "gamma": 0.8, "gae_lambda": 0.9}
    with ExitStack() as opened:
        arms = {}
        for name, make in (("ours", batched), ("stock", stock)):
            env = opened.enter_context(closing(make(case.task, case.num_envs, with_images)))
            arms[name] = learning(policy, env, case, count, **settings)
        yield arms


# ------------------------------------------------------------------------------------------------------------- compared
def measure(run: Run[Options]) -> Report:
    """Alternates the arms, case by case; raises ConfigError for an unknown case."""
    own = run.options
    torch.set_num_threads(1)
    rows, goals, content = [], [], {}
    for name, case in chosen(own.cases, CASES).items():
        work = case, own.iterations
        with mujoco(*work, own.compile) if name == "mujoco" else maniskill(*work, name == "images") as arms:
            timings = alternate(arms, own.rounds, warm_up=1)
        speed = {arm: [timing.rate for timing in several] for arm, several in timings.items()}
        content[name] = {arm: Spread.of(values) for arm, values in speed.items()}
        shown = f"{name}: {case.task}, {case.num_envs} rows"
        rows += [(shown, arm, f"{Spread.of(values):.0f}") for arm, values in speed.items()]
        (peer,) = speed.keys() - {"ours"}
        goals.append(Goal(f"{name}: ours / {peer}", ratios(speed["ours"], speed[peer]), case.goal, case.floor))
    table = Table(("case", "arm", "env steps/s of processor time, median (min-max)"), rows)
    said = "\n".join(str(goal) for goal in goals)
    return Report(content={"env_steps_per_s": content, "goals": goals}, text=f"{table}\n\n{said}")


BENCHMARK = Benchmark("sb3", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
