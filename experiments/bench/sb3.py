"""Our PPO and Stable-Baselines3's on a MuJoCo task, and SB3's on our batched ManiSkill: env steps per second.

python -m experiments.bench.sb3 [cases=mujoco,state,images] [rounds=5] [iterations=2] [task=...] [num_envs=...]
                                [obs_size=64] [clock=processor] [sbx=true] [compile=false] [out=docs/results/sb3.json]

    mujoco         our PPO and SB3's train an actor and a critic of 2 x 64 tanh units on 2,048 env steps an iteration
                   of HalfCheetah-v5 with the settings of algorithm=ppo_mujoco (minibatches of 64, 10 epochs, Adam
                   3e-4), without standardised observations, on 8 rows
    state, images  SB3's PPO trains on PickCube through envs.sb3.make_sb3, and on ManiSkill's single CPU envs with
                   its CPUGymWrapper in SB3's DummyVecEnv: 512 env steps an iteration, minibatches of 128, 4 epochs, on
                   16 rows; on the state, or on one camera and the robot's own state.  An episode ends when the task is
                   solved, or after 50 steps

sbx=true adds SBX's PPO, SB3's in JAX, to mujoco and state (pip install -c constraints.txt -e '.[peers]' first).  On
mujoco ours compiles the passes of its updates (algorithm.compile), and "ours, as is" does not; compile=false leaves the
first out.

Arms alternate in one process with one thread.  clock=processor counts seconds of processor time, to which other work
on the machine does not add; clock=wall counts wall time, which is right on an idle machine only.
"""

from __future__ import annotations

import importlib
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
from rlinf_embodied.errors import ConfigError

STEPS, MINIBATCH = 2048, 64  # env steps of an iteration and of a minibatch of PPO on MuJoCo
HORIZON, CONTROL = 50, "pd_joint_delta_pos"
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
Arm = Callable[[], Timing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""
    rounds: int = 5
    iterations: int = 2  # of each arm in a round
    task: str = ""  # "": the case's own
    num_envs: int = 0  # 0: the case's own
    obs_size: int = 64
    clock: str = "processor"
    sbx: bool = False
    compile: bool = True  # whether ours compiles its passes
    out: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """The arms that alternate: "ours", and those that it is compared with."""

    task: str
    num_envs: int
    iteration: int  # env steps
    goal: float
    floor: float | None = None


CASES = {
    "mujoco": Case("HalfCheetah-v5", 8, STEPS, 1.5, floor=1.0),
    "state": Case("PickCube-v1", 16, 512, 1.8),
    "images": Case("PickCube-v1", 16, 512, 5.0),
}


# --------------------------------------------------------------------------------------------------------------- mujoco
def our_words(task: str, num_envs: int) -> list[str]:
    """Returns the training that SB3's defaults describe, in words of experiments/train_vla.py."""
    return [
        *("env=gymnasium", f"env.id={task}", f"env.num_envs={num_envs}", f"env.block_size={num_envs}"),
        *(f"env.chunks_per_rollout={STEPS // num_envs}", "policy=actor_critic", "algorithm=ppo_mujoco"),
        *("algorithm.lr_end_fraction=1.0", f"algorithm.num_minibatches={STEPS // MINIBATCH}", "cluster=serial"),
        *("policy.options.normalize_observations=false", "policy.options.normalize_returns=false"),
        *("algorithm.one_optimizer=true", "algorithm.value_coef=1.0"),  # as SB3 and SBX have them
    ]


def our_config(task: str, num_envs: int, compile: bool) -> TrainConfig:
    """Returns that training, its passes compiled or not."""
    config = compose_train([*our_words(task, num_envs), "run.exact=exact", f"algorithm.compile={str(compile).lower()}"])
    return replace(config, warm_start=replace(config.warm_start, cache_dir=tempfile.mkdtemp(prefix="sb3-")))


@contextmanager
def mujoco(
    case: Case, count: int, clock: Callable[[], float], with_sbx: bool, compile: bool
) -> Iterator[dict[str, Arm]]:
    """Yields `count` iterations of this project's PPO, and of SB3's with its defaults on rows in this process."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    peers = {"sb3": PPO} | ({"sbx": sbx_ppo()} if with_sbx else {})
    settings = {"n_steps": STEPS // case.num_envs, "batch_size": MINIBATCH}
    theirs = {
        name: learning(
            kind, "MlpPolicy", make_vec_env(case.task, case.num_envs, seed=0), count * STEPS, clock, **settings
        )
        for name, kind in peers.items()
    }
    compiles = {"ours": True, "ours, as is": False} if compile else {"ours": False}
    with ExitStack() as stack:
        mine = {name: stack.enter_context(ours(case, count, clock, each)) for name, each in compiles.items()}
        yield {**mine, **theirs}


@contextmanager
def ours(case: Case, count: int, clock: Callable[[], float], compile: bool) -> Iterator[Arm]:
    """Yields `count` iterations of this project's PPO."""
    config = our_config(case.task, case.num_envs, compile)
    job = EmbodiedJob(config)
    with in_this_process(job.workflow(starting_folder(config, in_process=True)), COLLOCATED) as executor:
        steps = iterations(job, executor, sys.maxsize)

        def run() -> Timing:
            start = clock()
            done = sum(int(next(steps)[1]["rollout/env_steps"]) for _ in range(count))
            return Timing(clock() - start, done)

        yield run


def sbx_ppo() -> Any:
    """Returns SBX's class.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("sbx").PPO
    except ImportError as error:
        raise ConfigError(
            f"sbx is true, but it cannot be imported ({error}): pip install -c constraints.txt -e '.[peers]'"
        ) from error


def learning(kind: Any, policy: str, env: Any, count: int, clock: Callable[[], float], **settings: Any) -> Arm:
    """Returns what runs `count` env steps of a PPO with SB3's interface."""
    model = kind(policy, env, device="cpu", seed=0, **settings)

    def run() -> Timing:
        start, before = clock(), model.num_timesteps
        model.learn(count, reset_num_timesteps=False)
        return Timing(clock() - start, model.num_timesteps - before)

    return run


# ------------------------------------------------------------------------------------------------------------ ManiSkill
def stock_row(task: str, obs_size: int | None, seed: int, whole_episodes: bool = False) -> Any:
    """Returns one stock env as SB3 takes it; images for a size, the state for None."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  registers the tasks
    from mani_skill.utils.wrappers.flatten import FlattenRGBDObservationWrapper
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
    from stable_baselines3.common.monitor import Monitor

    plain = {"num_envs": 1, "sim_backend": "physx_cpu", "reward_mode": "normalized_dense", "control_mode": CONTROL}
    if obs_size is None:
        env = gymnasium.make(task, obs_mode="state", render_backend="none", **plain)
    else:
        sizes = {"width": obs_size, "height": obs_size}
        env = FlattenRGBDObservationWrapper(gymnasium.make(task, obs_mode="rgb", sensor_configs=sizes, **plain))
    row = Monitor(CPUGymWrapper(env, ignore_terminations=whole_episodes, record_metrics=False))
    row.reset(seed=seed)
    return row


def stock(task: str, num_envs: int, obs_size: int | None, seed: int = 0, whole_episodes: bool = False) -> Any:
    """Returns the rows as SB3 makes them of single envs, in one process; success ends no episode of whole ones."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([partial(stock_row, task, obs_size, seed + row, whole_episodes) for row in range(num_envs)])


def batched(task: str, num_envs: int, obs_size: int | None) -> Any:
    """Returns the rows of one env object of ours."""
    from envs.sb3 import make_sb3

    shown: dict[str, Any] = {} if obs_size is None else {"cameras": ["base_camera"], "obs_size": obs_size}
    observations = "state" if obs_size is None else "dict"
    return make_sb3(task, num_envs, observations=observations, horizon=HORIZON, control_mode=CONTROL, **shown)


@contextmanager
def maniskill(
    case: Case, count: int, clock: Callable[[], float], obs_size: int | None, with_sbx: bool
) -> Iterator[dict[str, Arm]]:
    """Yields `count` iterations of SB3's PPO on stock envs and on ours, and on a state of SBX's."""
    from stable_baselines3 import PPO

    policy = "MlpPolicy" if obs_size is None else "MultiInputPolicy"
    settings = {"n_steps": case.iteration // case.num_envs, "batch_size": 128, "n_epochs": 4}
    settings |= {"gamma": 0.8, "gae_lambda": 0.9}
    shape = case.task, case.num_envs, obs_size
    kinds = {"": PPO} | ({", sbx": sbx_ppo()} if with_sbx and obs_size is None else {})
    with ExitStack() as opened:
        arms = {}
        for suffix, kind in kinds.items():
            for name, make in (("stock", stock), ("ours", batched)):
                env = opened.enter_context(closing(make(*shape)))
                arms[name + suffix] = learning(kind, policy, env, count * case.iteration, clock, **settings)
        yield arms


# ------------------------------------------------------------------------------------------------------------- compared
def measure(run: Run[Options]) -> Report:
    """Alternates the arms, case by case.

    Raises:
        ConfigError: an unknown clock or case, or rows that do not divide an iteration.
    """
    own = run.options
    (clock,) = chosen(own.clock, CLOCKS, "clock").values()
    cases = {
        name: replace(case, task=own.task or case.task, num_envs=own.num_envs or case.num_envs)
        for name, case in chosen(own.cases, CASES).items()
    }
    for case in cases.values():
        if case.num_envs < 1 or case.iteration % case.num_envs:
            raise ConfigError(
                f"num_envs is {case.num_envs}, but an iteration has {case.iteration} env steps: use a divisor, as 8"
            )
    torch.set_num_threads(1)
    rows, goals, content = [], [], {}
    for name, case in cases.items():
        sizes = {"state": None, "images": own.obs_size}
        work = case, own.iterations, clock
        with maniskill(*work, sizes[name], own.sbx) if name in sizes else mujoco(*work, own.sbx, own.compile) as arms:
            timings = alternate(arms, own.rounds, warm_up=1)
        speed = {arm: [timing.rate for timing in several] for arm, several in timings.items()}
        content[name] = {arm: Spread.of(values) for arm, values in speed.items()}
        shown = f"{name}: {case.task}, {case.num_envs} rows"
        rows += [(shown, arm, f"{Spread.of(values):.0f}") for arm, values in speed.items()]
        for other in [arm for arm in speed if not arm.startswith("ours")]:
            mine = other.replace("stock", "ours") if other.startswith("stock") else "ours"
            goals.append(Goal(f"{name}: {mine} / {other}", ratios(speed[mine], speed[other]), case.goal, case.floor))
    table = Table(("case", "arm", f"env steps/s ({own.clock}), median (min-max)"), rows)
    said = "\n".join(str(goal) for goal in goals)
    return Report(content={"env_steps_per_s": content, "goals": goals}, text=f"{table}\n\n{said}")


BENCHMARK = Benchmark("sb3", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
