"""Our PPO and SAC and Stable-Baselines3's on a MuJoCo task, SB3's PPO on our batched ManiSkill: env steps per second.

python -m experiments.bench.sb3 [cases=mujoco,sac,state,images] [rounds=5] [iterations=2] [compile=true] [sbx=true]
                                [out=docs/results/sb3.json]

    mujoco         our PPO and SB3's train an actor and a critic of 2 x 64 tanh units on 2,048 env steps an iteration
                   of HalfCheetah-v5 with the settings of algorithm=ppo_mujoco (minibatches of 64, 10 epochs, Adam
                   3e-4), without standardised observations, on 8 rows; compile: see algorithm.compile
    sac            the same of SAC: networks of 2 x 256, 64 env steps and 64 updates of 256 transitions an iteration
    state, images  SB3's PPO trains on PickCube through envs.sb3.make_sb3, and on ManiSkill's single CPU envs with
                   its CPUGymWrapper in SB3's DummyVecEnv: 512 env steps an iteration, minibatches of 128, 4 epochs, on
                   32 rows; on the state, or on one camera of 64 x 64 pixels and the robot's own state.  An episode
                   ends when the task is solved, or after 50 steps

sbx=true adds SBX's PPO or SAC, SB3's in JAX, to mujoco and sac (pip install sbx-rl==0.28.0 first).

Arms alternate in one process with one thread.  Seconds are of processor time, to which other work on the machine does
not add, and of wall time.
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

from experiments.bench.harness import Benchmark, Goal, Run, Spread, Timing, alternate, chosen, ratios, table
from experiments.bench.harness.trainings import in_this_process, iterations, starting_folder
from rlinf_embodied.compose import compose_train
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.errors import ConfigError

HORIZON, CONTROL, PIXELS = 50, "pd_joint_delta_pos", 64  # of ManiSkill's rows
MINIBATCH = 64  # env steps of PPO's minibatches on MuJoCo
WARM_UP = 16  # iterations of SAC before its first update
SB3, SBX = {"sb3": "stable_baselines3"}, {"sbx": "sbx"}  # modules by the names of arms
SBX_GOAL = 1.0
Arm = Callable[[], Timing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""
    rounds: int = 5
    iterations: int = 2  # of each arm in a round
    compile: bool = True
    sbx: bool = False  # adds SBX's algorithm
    out: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Two arms that alternate."""

    task: str
    num_envs: int
    steps: int  # env steps of an iteration
    goal: float  # of ours over SB3's, or over SB3's on stock rows


CASES = {
    "mujoco": Case("HalfCheetah-v5", 8, 2048, 1.5),
    "sac": Case("HalfCheetah-v5", 8, 64, 1.5),
    "state": Case("PickCube-v1", 32, 512, 1.8),
    "images": Case("PickCube-v1", 32, 512, 5.0),
}


# --------------------------------------------------------------------------------------------------------------- MuJoCo
def our_words(name: str, case: Case, compile: bool) -> list[str]:
    """Returns the arguments of the training of "mujoco" or "sac" that SB3's defaults describe, compiled or not."""
    own = {
        "mujoco": f"""policy=actor_critic algorithm=ppo_mujoco algorithm.num_minibatches={case.steps // MINIBATCH}
            policy.options.normalize_observations=false policy.options.normalize_returns=false
            algorithm.lr_end_fraction=1.0 algorithm.value_clip=null algorithm.value_coef=1.0""",
        "sac": f"policy=soft_actor algorithm=sac algorithm.warmup_steps={WARM_UP * case.steps}",
    }
    words = f"""env=gymnasium env.id={case.task} {own[name]} cluster=serial run.exact=exact
        env.num_envs={case.num_envs} env.block_size={case.num_envs} algorithm.compile={str(compile).lower()}
        env.chunks_per_rollout={case.steps // case.num_envs}"""
    return words.split()


def peer(name: str, case: Case, library: str, seed: int) -> Any:
    """Returns a library's PPO or SAC with its defaults, on rows in this process.

    Raises:
        ConfigError: the library is not installed.
    """
    from stable_baselines3.common.env_util import make_vec_env

    settings = {
        "mujoco": {"n_steps": case.steps // case.num_envs, "batch_size": MINIBATCH},
        "sac": {
            **{"train_freq": case.steps // case.num_envs, "gradient_steps": case.steps},
            "learning_starts": WARM_UP * case.steps,
        },
    }
    env, kind = make_vec_env(case.task, case.num_envs, seed=seed), "SAC" if name == "sac" else "PPO"
    return _found(library, kind)("MlpPolicy", env, device="cpu", seed=seed, **settings[name])


@contextmanager
def mujoco(name: str, case: Case, own: Options) -> Iterator[dict[str, Arm]]:
    """Yields iterations of this project's algorithm, and of each library's with its defaults on rows in this process.

    Raises:
        ConfigError: SBX is asked for and not installed.
    """
    config = compose_train(our_words(name, case, own.compile))
    config = replace(config, warm_start=replace(config.warm_start, cache_dir=tempfile.mkdtemp(prefix="sb3-")))
    job = EmbodiedJob(config)
    replay = ["replay on all"] if name == "sac" else []
    plan = [{"items": ["env+policy on all", *replay, "actor on all"]}]
    with in_this_process(job.workflow(starting_folder(config, in_process=True)), plan) as executor:
        steps = iterations(job, executor, sys.maxsize)
        arms = {"ours": lambda: sum(int(next(steps)[1]["rollout/env_steps"]) for _ in range(own.iterations))}
        for arm, library in (SB3 | SBX if own.sbx else SB3).items():
            arms[arm] = partial(_learn, peer(name, case, library, 0), own.iterations * case.steps)
        for _ in range(-(-WARM_UP // own.iterations) if name == "sac" else 0):
            for run in arms.values():
                run()
        yield {arm: partial(timed, run) for arm, run in arms.items()}


def _found(library: str, kind: str) -> Any:
    try:
        return getattr(importlib.import_module(library), kind)
    except ImportError as error:
        raise ConfigError(f"sbx is true, but it cannot be imported ({error}): pip install sbx-rl==0.28.0") from error


def _learn(model: Any, steps: int) -> int:
    """Runs at least so many env steps of an algorithm of SB3's or SBX's and returns how many they were."""
    before = model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return model.num_timesteps - before


def timed(run: Callable[[], int]) -> Timing:
    """Returns the processor seconds of what returns its number of env steps, with those of the wall clock."""
    start, wall = time.process_time(), time.perf_counter()
    steps = run()
    return Timing(time.process_time() - start, steps, {"wall": time.perf_counter() - wall})


# ------------------------------------------------------------------------------------------------------------ ManiSkill
def stock_row(task: str, with_images: bool, seed: int) -> Any:
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
    from envs.sb3 import make_sb3

    shown: dict[str, Any] = {"cameras": ["base_camera"], "obs_size": PIXELS} if with_images else {}
    observations = "dict" if with_images else "state"
    return make_sb3(task, num_envs, observations=observations, horizon=HORIZON, control_mode=CONTROL, **shown)


@contextmanager
def maniskill(case: Case, count: int, with_images: bool) -> Iterator[dict[str, Arm]]:
    """Yields `count` iterations of SB3's PPO on stock envs and on ours."""
    from stable_baselines3 import PPO

    policy = "MultiInputPolicy" if with_images else "MlpPolicy"
    settings = {"batch_size": 128, "n_epochs": 4, "gamma": 0.8, "gae_lambda": 0.9}
    with ExitStack() as opened:
        arms = {}
        for name, make in (("ours", batched), ("stock", stock)):
            env = opened.enter_context(closing(make(case.task, case.num_envs, with_images)))
            model = PPO(policy, env, device="cpu", seed=0, n_steps=case.steps // case.num_envs, **settings)
            arms[name] = partial(timed, partial(_learn, model, count * case.steps))
        yield arms


# ------------------------------------------------------------------------------------------------------------- compared
def measure(run: Run[Options]) -> None:
    own = run.options
    rows, goals, content, walls = [], [], {}, {}
    for name, case in chosen(own.cases, CASES).items():
        gymnasium = name in ("mujoco", "sac")
        with mujoco(name, case, own) if gymnasium else maniskill(case, own.iterations, name == "images") as arms:
            timings = alternate(arms, own.rounds, warm_up=1)
        speed = {arm: [timing.rate for timing in several] for arm, several in timings.items()}
        wall = {arm: [timing.count / timing.parts["wall"] for timing in each] for arm, each in timings.items()}
        content[name] = {arm: Spread.of(values) for arm, values in speed.items()}
        walls[name] = {arm: Spread.of(values) for arm, values in wall.items()}
        shown = f"{name}: {case.task}, {case.num_envs} rows"
        rows += [(shown, arm, f"{content[name][arm]:.0f}", f"{walls[name][arm]:.0f}") for arm in speed]
        for peer in speed.keys() - {"ours"}:
            goal = SBX_GOAL if peer in SBX else case.goal
            goals.append(Goal(f"{name}: ours / {peer}", ratios(speed["ours"], speed[peer]), goal))
            goals.append(Goal(f"{name}: ours / {peer}, wall time", ratios(wall["ours"], wall[peer]), goal))
    header = ("case", "arm", "env steps/s of processor time, median (min-max)", "of wall time")
    print(table(header, rows), "", *goals, sep="\n")
    run.write({"env_steps_per_s": content, "env_steps_per_wall_s": walls, "goals": goals})


BENCHMARK = Benchmark("sb3", Options, measure)

if __name__ == "__main__":
    BENCHMARK.main()
