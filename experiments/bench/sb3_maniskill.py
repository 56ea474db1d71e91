"""Stable-Baselines3's own PPO on PickCube: through our VecEnv, and on stock ManiSkill; env steps per second.

python -m experiments.bench.sb3_maniskill [rounds=3] [modes=state,images] [num_envs=16] [learn=1024] [obs_size=64]
                                          [task=PickCube-v1] [clock=processor] [out=docs/results/sb3_maniskill.json]

    stock   ManiSkill's single CPU envs with its CPUGymWrapper, one per row, in SB3's DummyVecEnv
    ours    envs.vector.make_sb3: the same rows, batched

Both train the same network with the same settings (512 env steps an iteration, minibatches of 128, 4 epochs), in one
process and one thread each, in turn: on the state, or on one camera and the robot's own state.  An episode ends when
the task is solved, or after 50 steps.  clock=processor counts seconds of processor time; clock=wall is right on an idle
machine only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from experiments.bench.harness import Benchmark, Goal, Report, Run, Spread, Table, Timing, alternate, chosen, ratios
from experiments.bench.peers import CLOCKS
from rlinf_embodied.errors import ConfigError

ITERATION, HORIZON = 512, 50  # env steps
CONTROL = "pd_joint_delta_pos"
Arm = Callable[[], Timing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    rounds: int = 3
    modes: str = "state,images"
    num_envs: int = 16
    learn: int = 1024  # env steps of each arm in a round
    obs_size: int = 64
    task: str = "PickCube-v1"
    clock: str = "processor"
    out: str = ""


def stock_row(task: str, obs_size: int | None, seed: int) -> Any:
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
    row = Monitor(CPUGymWrapper(env, ignore_terminations=False, record_metrics=False))
    row.reset(seed=seed)
    return row


def stock(task: str, num_envs: int, obs_size: int | None) -> Any:
    """Returns the rows as SB3 makes them of single envs, in one process."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([partial(stock_row, task, obs_size, seed) for seed in range(num_envs)])


def ours(task: str, num_envs: int, obs_size: int | None) -> Any:
    """Returns the rows batched."""
    from envs.vector import make_sb3

    shown: dict[str, Any] = {} if obs_size is None else {"cameras": ["base_camera"], "obs_size": obs_size}
    observations = "state" if obs_size is None else "dict"
    return make_sb3(task, num_envs, observations=observations, horizon=HORIZON, control_mode=CONTROL, **shown)


def trained(env: Any, images: bool, count: int, clock: Callable[[], float]) -> Arm:
    """Returns what runs `count` env steps of SB3's PPO."""
    from stable_baselines3 import PPO

    model = PPO(
        "MultiInputPolicy" if images else "MlpPolicy",
        env,
        n_steps=ITERATION // env.num_envs,
        batch_size=128,
        n_epochs=4,
        gamma=0.8,
        gae_lambda=0.9,
        device="cpu",
        seed=0,
    )

    def run() -> Timing:
        start, before = clock(), model.num_timesteps
        model.learn(count, reset_num_timesteps=False)
        return Timing(clock() - start, model.num_timesteps - before)

    return run


def measure(run: Run[Options]) -> Report:
    """Lets both take turns, mode by mode.

    Raises:
        ConfigError: an unknown clock or mode, or rows that do not divide an iteration.
    """
    own = run.options
    (clock,) = chosen(own.clock, CLOCKS, "clock").values()
    modes = chosen(own.modes, {"state": None, "images": own.obs_size}, "modes")
    if own.num_envs < 1 or ITERATION % own.num_envs:
        raise ConfigError(
            f"num_envs is {own.num_envs}, but an iteration has {ITERATION} env steps: use a divisor, as 16"
        )
    torch.set_num_threads(1)
    rows, goals, content = [], [], {}
    for mode, size in modes.items():
        envs = {"stock": stock(own.task, own.num_envs, size), "ours": ours(own.task, own.num_envs, size)}
        arms = {name: trained(env, size is not None, own.learn, clock) for name, env in envs.items()}
        timings = alternate(arms, own.rounds, warm_up=1)
        speed = {name: [timing.rate for timing in several] for name, several in timings.items()}
        content[mode] = {name: Spread.of(values) for name, values in speed.items()}
        rows += [(mode, name, f"{Spread.of(values):.0f}") for name, values in speed.items()]
        goals.append(Goal(f"{mode}: ours / stock", ratios(speed["ours"], speed["stock"]), 5.0 if size else 1.8))
        for env in envs.values():
            env.close()
    table = Table((own.task, f"{own.num_envs} rows", f"env steps/s ({own.clock}), median (min-max)"), rows)
    said = "\n".join(str(goal) for goal in goals)
    return Report(content={"env_steps_per_s": content, "goals": goals}, text=f"{table}\n\n{said}")


BENCHMARK = Benchmark("sb3_maniskill", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
