"""The pieces that are timed, in a process of their own."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# Envs are looked into, and gymnasium's `make` hands its keywords on.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

import gymnasium as gym
import mani_skill.envs  # noqa: F401  registers the tasks
import torch
from torch import Tensor

from envs.batched.physics import PhysicsBatch
from envs.batched.task import BatchedTask
from envs.maniskill import make_env
from envs.vector import make, make_vec
from experiments.bench.harness import Timing, seconds_of
from rlinf_embodied.config import Backend, EnvConfig, Reward

HORIZON, CHUNK, PIXELS = 50, 5, 64
EPISODES = 2  # of every row in a measurement
STOCK_STEPS = {"state": 200, "rgb": 50}
CAMERA = {"width": PIXELS, "height": PIXELS}


class Stopwatch:
    """Adds up the seconds within calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable) -> Callable:
        """Returns the function with its time added up."""
        clock = time.perf_counter

        def timed(*args: object) -> object:
            start = clock()
            result = function(*args)
            self.seconds += clock() - start
            return result

        return timed


@contextmanager
def physx_watched(px: PhysicsBatch) -> Iterator[Stopwatch]:
    """Within it, the time within SAPIEN's step is added up, also for scenes that are recreated meanwhile."""
    watch, recreate_scene = Stopwatch(), px.recreate_scene

    def watched(i: int) -> None:
        step, pack, pack_poses = px._calls[i]
        px._calls[i] = watch.around(step), pack, pack_poses

    def recreated_scene(i: int) -> None:
        recreate_scene(i)
        watched(i)

    for i in range(px.num_scenes):
        watched(i)
    px.recreate_scene = recreated_scene
    try:
        yield watch
    finally:
        del px.recreate_scene
        for i, scene in enumerate(px.scenes):
            _, pack, pack_poses = px._calls[i]
            px._calls[i] = scene.physx_system.step, pack, pack_poses


class Bench:
    """Everything that can be measured in this process; envs are built when they are first needed."""

    def __init__(self, task: str) -> None:
        torch.set_num_threads(1)
        self._task = task
        self._draw = torch.Generator().manual_seed(0)
        self.stock_env, self.state_env, self.rgb_env = cache(self._stock), cache(self._state), cache(self._rgb)
        self.rgb_task = cache(self._rgb_task)

    def _stock(self, mode: str, control: str) -> gym.Env:
        rendering = {"render_backend": "none"} if mode == "state" else {"sensor_configs": CAMERA}
        kwargs = {"obs_mode": mode, "control_mode": control, "sim_backend": "physx_cpu", **rendering}
        env = gym.make(self._task, max_episode_steps=HORIZON, **kwargs)
        env.reset(seed=0)
        env.step(None)
        return env

    def _state(self, control: str, num_envs: int, num_threads: int = 1):
        env = make_vec(
            self._task,
            num_envs,
            obs_mode="state",
            control_mode=control,
            max_episode_steps=HORIZON,
            ignore_terminations=True,
            num_threads=num_threads,
        )
        env.reset(seed=0)
        return env

    def _rgb(self, control: str, num_envs: int):
        config = EnvConfig(
            task=self._task,
            robot=None,
            control_mode=control,
            cameras=["base_camera"],
            camera_fov=None,
            obs_size=PIXELS,
            horizon=HORIZON,
            chunk=CHUNK,
            reward=Reward.dense,
            backend=Backend.batched,
            hold_steps=0,
        )
        return make_env(config, num_envs)

    def _rgb_task(self, control: str, num_envs: int) -> BatchedTask:
        env = make(self._task, num_envs, obs_mode="rgb", control_mode=control, sensor_configs=CAMERA, decimate=True)
        env.reset(seed=0)
        return cast(BatchedTask, env.unwrapped)

    def _actions(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._draw) * 2 - 1

    # ---------------------------------------------------------------------------------------------------------- pieces
    def steps(self, mode: str, control: str, num_envs: int, num_threads: int = 1) -> Timing:
        """Times env steps with resets; num_envs=0 is the stock env."""
        if num_envs == 0:
            return self._stock_steps(mode, control)
        if mode == "state":
            return self._state_steps(self.state_env(control, num_envs, num_threads))
        return self._rgb_steps(self.rgb_env(control, num_envs))

    def _stock_steps(self, mode: str, control: str) -> Timing:
        env = self.stock_env(mode, control)
        count = STOCK_STEPS[mode]
        todo = self._actions(count, *cast(gym.spaces.Box, env.action_space).shape)
        start = time.perf_counter()
        for k, action in enumerate(todo):
            if k % HORIZON == 0:
                env.reset(seed=k)
            env.step(action)
        return Timing(time.perf_counter() - start, count)

    def _state_steps(self, env) -> Timing:
        todo = self._actions(EPISODES * HORIZON, env.num_envs, *env.single_action_space.shape)
        with physx_watched(env.base_env.scene.px) as watch:
            start = time.perf_counter()
            for action in todo:
                env.step(action)
            seconds = time.perf_counter() - start
        return Timing(seconds, todo.shape[0] * env.num_envs, {"physx": watch.seconds, "pictures": 0.0})

    def _rgb_steps(self, env) -> Timing:
        n = env.spec.num_envs
        chunks = self._actions(EPISODES * HORIZON // CHUNK, n, CHUNK, env.spec.action_dim)
        pictures, stock = Stopwatch(), env._sim.images
        env._sim.images = pictures.around(stock)
        with physx_watched(env._sim._task.scene.px) as watch:
            start = time.perf_counter()
            env.reset(range(n))
            for k, actions in enumerate(chunks):
                env.step_chunk(actions, range(k * n, (k + 1) * n))
            seconds = time.perf_counter() - start
        env._sim.images = stock
        parts = {"physx": watch.seconds, "pictures": pictures.seconds}
        return Timing(seconds, len(chunks) * n * CHUNK, parts)

    def pictures(self, control: str, num_envs: int) -> Timing:
        """Times one picture of every row, as our env takes them."""
        env = self.rgb_env(control, num_envs)
        env.reset(range(num_envs))
        return Timing(seconds_of(lambda: env._sim.images(range(num_envs))), num_envs)

    def rgb_observation(self, control: str, num_envs: int) -> Timing:
        """Times one observation of every row in ManiSkill's obs_mode="rgb"."""
        env = self.rgb_task(control, num_envs)
        env.advance(self._actions(num_envs, *env.single_action_space.shape), range(num_envs))
        info = env.get_info()
        return Timing(seconds_of(lambda: env.get_obs(info)), num_envs)

    def reset_one(self, control: str, num_envs: int) -> Timing:
        """Times the reset of single rows, observation and info included."""
        env, times = self.state_env(control, num_envs), 8
        start = time.perf_counter()
        for row in range(times):
            env.reset(options={"env_idx": torch.tensor([row])})
        return Timing(time.perf_counter() - start, times)

    def reset_all(self, control: str, num_envs: int) -> Timing:
        """Times the reset of all rows, observation and info included."""
        env = self.state_env(control, num_envs)
        return Timing(seconds_of(env.reset), num_envs)
