"""N rows of any ManiSkill task in one process on CPU cores, in the place of `gym.make`.

    import envs.vector

    env = envs.vector.make("PickCube-v1", num_envs=32, obs_mode="state", control_mode="pd_joint_delta_pos")
    vector_env = ManiSkillVectorEnv(env, record_metrics=True)  # ManiSkill's own wrapper

    vector_env = envs.vector.make_vec("PickCube-v1", num_envs=32, obs_mode="state")  # both at once
    vector_env = gymnasium.make_vec("envs.vector:batched/PickCube-v1", num_envs=32, obs_mode="state")  # the same

    vec_env = envs.vector.make_sb3("PickCube-v1", num_envs=32)  # of any env of this project, for Stable-Baselines3
    vector_env = envs.vector.make_vector("PickCube-v1", num_envs=32)  # and for libraries on gymnasium.vector

What `make` returns has the interface of ManiSkill's GPU envs, with tensors on the CPU: `reset(seed, options)` with
options["env_idx"], `step(actions [N, A])`, info and observations with N rows.  Row i behaves, bit for bit, as a stock
single env that was built with seed 2022 + i and reset with the row's seed; an episode does not depend on those before.
`reset()` without a seed draws one for each row from the row's own generator, and leaves torch's generator alone.

A task that cannot take the batched route runs on N stock env objects behind the same interface (`stacked`), and the log
says why, once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, cast

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import OrderEnforcing
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import REGISTERED_ENVS, TimeLimitWrapper
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

from envs.adapters.gymnasium_vector import GymnasiumVector
from envs.adapters.single_steps import Shown
from envs.availability import BUILD_ERRORS, check_assets, check_name, explained, no_questions, say_fallback
from envs.batched.build import make_batched_task
from envs.batched.checks import check_num_envs
from envs.batched.choice import how_to_run
from envs.batched.single import Alone
from envs.stacked import StackedEnv
from envs.stock import action_dim, task_actions
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import VectorEnv
from rlinf_embodied.plug_ins import load_target

if TYPE_CHECKING:
    from envs.adapters.sb3 import StableBaselinesVec

NAMESPACE = "batched"  # of the ids in gymnasium's registry
_NO_MATTER = ("render_mode", "render_backend", "reconfiguration_freq")  # to whether rows equal stock envs
_STATE_MODES = (None, "none", "state", "state_dict")
CPU_BACKENDS = ("auto", "cpu", "physx_cpu")


class Route(StrEnum):
    """What simulates the rows."""

    auto = "auto"
    batched = "batched"
    stock = "stock"


def make(
    task_id: str,
    num_envs: int = 1,
    *,
    max_episode_steps: int | None = None,
    sim_backend: str = "auto",
    route: Route | str = Route.auto,
    num_threads: int = 1,
    history_free: bool = True,
    decimate: bool = False,
    **kwargs: object,
) -> gym.Env:
    """Returns N rows of a ManiSkill task as one env, with ManiSkill's time limit.

    Args:
        task_id: a registered task.
        num_envs: rows N.
        max_episode_steps: env steps until truncation; None: the task's own.
        sim_backend: a name of ManiSkill's CPU backend, or "auto".
        route: "batched" or "stock"; "auto" is batched where that takes the task, else stock.
        num_threads: threads that step the batched scenes, with the same results.
        history_free: on the stock route, whether a reset also recreates the row's scene (batched rows
            always have one).
        decimate: whether images show meshes with as few triangles as their pixels can tell (on a CPU an observation
            costs 1 ms then, and with the original meshes 40); of batched rows only.
        kwargs: as in `gym.make`, for the task class: obs_mode, control_mode, reward_mode, render_mode, sensor_configs,
            robot_uids, reconfiguration_freq, render_backend (default "cpu"; "none" where nothing is rendered), ...

    Raises:
        ConfigError: an unknown task or control mode, no rows, a backend that is not on the CPU, or render_mode="human".
        SimulatorError: assets are missing, or the route cannot build the task with these arguments.
    """
    check_name("task_id", task_id, REGISTERED_ENVS)
    check_num_envs(num_envs)
    if route not in list(Route):
        raise ConfigError(f"route is {route!r}, but there are {', '.join(Route)}: use one of these")
    if sim_backend not in CPU_BACKENDS:
        raise ConfigError(
            f"sim_backend is {sim_backend!r}, but this env runs on the CPU: leave it out, use one of "
            f"{', '.join(CPU_BACKENDS)}, or gym.make for GPU backends"
        )
    if kwargs.get("render_mode") == "human":
        raise ConfigError(
            "render_mode is 'human', which shows one scene: use 'rgb_array', or gym.make for a single env"
        )
    check_assets("task_id", task_id)
    kwargs = {"obs_mode": None, "render_mode": None, "reconfiguration_freq": None, **kwargs}
    blind = kwargs["obs_mode"] in _STATE_MODES and kwargs["render_mode"] is None

    def build(render_backend: object) -> BaseEnv | StackedEnv:
        wanted = {**kwargs, "render_backend": render_backend}
        builders = {
            Route.batched: partial(_batched, task_id, num_envs, num_threads, decimate, wanted),
            Route.stock: partial(StackedEnv, task_id, num_envs, history_free, **wanted),
        }
        with no_questions(), explained("control_mode", f"{task_id} cannot be built with {wanted}"):
            return _first_of(builders, task_id) if route == Route.auto else builders[Route(route)]()

    if blind and "render_backend" not in kwargs:
        try:
            env = build("none")
        except SimulatorError:  # a few tasks, like PushT, look their visual bodies up when they are built
            env = build("cpu")
    else:
        env = build(kwargs.get("render_backend", "cpu"))
    limit = REGISTERED_ENVS[task_id].max_episode_steps if max_episode_steps is None else max_episode_steps
    env.spec = _spec(task_id, limit, {**kwargs, "num_envs": num_envs})
    return TimeLimitWrapper(OrderEnforcing(env), limit)


def make_vec(
    task_id: str,
    num_envs: int = 1,
    *,
    auto_reset: bool = True,
    ignore_terminations: bool = False,
    record_metrics: bool = True,
    **kwargs: object,
) -> ManiSkillVectorEnv:
    """Returns N rows of a ManiSkill task as a gymnasium vector env: ManiSkill's own, around `make`.

    Args:
        task_id: a registered task.
        num_envs: rows N.
        auto_reset: whether a row whose episode ended is reset within the same step; its last observation and info are
            then in info["final_observation"] and info["final_info"].
        ignore_terminations: whether episodes end by their time limit only.
        record_metrics: whether info["episode"] has return, length and success.
        kwargs: for `make`.

    Raises:
        ConfigError: see `make`.
        SimulatorError: see `make`.
    """
    return ManiSkillVectorEnv(
        make(task_id, num_envs, **kwargs),
        auto_reset=auto_reset,
        ignore_terminations=ignore_terminations,
        record_metrics=record_metrics,
    )


def make_vector(
    env: str | EnvConfig = "PickCube-v1",
    num_envs: int = 1,
    *,
    observations: Shown | str = Shown.state,
    **settings: object,
) -> GymnasiumVector:
    """Returns rows of any env of this project as a `gymnasium.vector.VectorEnv` with numpy arrays.

    Args:
        env: a ManiSkill task, or the section `env` of a config, of which chunks must be of one action.
        num_envs: rows N.
        observations: "state" (all that the simulator knows), "proprio", "image" or "dict".
        settings: of the section (rlinf_embodied/config/env.py): horizon, robot, control_mode, cameras, obs_size, ...

    Raises:
        ConfigError: a setting cannot be used.
        SimulatorError: the env cannot be built.
    """
    return GymnasiumVector(_rows_of(env, num_envs, settings), observations)


def make_sb3(
    env: str | EnvConfig = "PickCube-v1",
    num_envs: int = 1,
    *,
    observations: Shown | str = Shown.state,
    **settings: object,
) -> StableBaselinesVec:
    """Returns rows of any env of this project as a Stable-Baselines3 `VecEnv`; arguments as `make_vector`.

    Raises:
        ConfigError: a setting cannot be used.
        SimulatorError: the env cannot be built.
    """
    from envs.adapters.sb3 import StableBaselinesVec  # takes a second, which `make` need not

    return StableBaselinesVec(_rows_of(env, num_envs, settings), observations)


def _rows_of(env: str | EnvConfig, num_envs: int, settings: Mapping[str, object]) -> VectorEnv:
    """Returns the rows; of a ManiSkill task with its dense reward, ended by success as `gym.make` has it."""
    if isinstance(env, str):
        plain = {"chunk": 1, "cameras": [], "reward": Reward.dense, "success_bonus": 0.0, "hold_steps": 1}
        known = {field.name for field in fields(EnvConfig)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(f"{unknown[0]} is no setting of an env: see rlinf_embodied/config/env.py")
        asked = {"task": env, "num_envs": num_envs, "block_size": num_envs} | plain | dict(settings)
        config = EnvConfig(**asked)  # pyright: ignore[reportArgumentType]
    else:
        config = replace(env, num_envs=num_envs, block_size=num_envs, **settings)  # pyright: ignore[reportArgumentType]
    return cast(VectorEnv, load_target(config._target_)(config, num_envs, "cpu", True))


def _first_of(builders: dict[Route, Callable[[], BaseEnv | StackedEnv]], task_id: str) -> BaseEnv | StackedEnv:
    """Returns the batched task, or stock envs where that route cannot take it, and then says why."""
    try:
        return builders[Route.batched]()
    except (SimulatorError, *BUILD_ERRORS) as error:
        reason = error
    env = builders[Route.stock]()
    say_fallback(task_id, reason)
    return env


def _batched(task_id: str, num_envs: int, num_threads: int, decimate: bool, kwargs: dict[str, object]) -> BaseEnv:
    """Returns the batched task after a try: some tasks build well, but cannot be reset in part."""
    alone = how_to_run(task_id, **{name: value for name, value in kwargs.items() if name not in _NO_MATTER})
    if alone is not Alone.nothing and kwargs["reconfiguration_freq"]:
        raise SimulatorError(f"its {alone.value} is done row by row, and such rows are not built anew: leave it at 0")
    alike = alone is not Alone.nothing  # then one stock env stands for all rows
    how = {"rows_alike": alike, "num_threads": num_threads, "decimate": decimate}
    env = make_batched_task(task_id, num_envs, True, alone, **how, **kwargs)
    last = num_envs - 1
    env.begin([last], [0])
    actions = task_actions(env, torch.zeros(num_envs, action_dim(env)))
    env.advance(actions, [last])
    env.get_reward(obs=env.get_obs(unflattened=True), action=actions, info=env.get_info())
    return env


def _spec(task_id: str, max_episode_steps: int | None, kwargs: dict[str, object]) -> EnvSpec:
    """Returns gymnasium's record of how the env was made, as `gym.make` keeps it."""
    spec = copy.deepcopy(gym.spec(task_id))
    spec.kwargs.update(kwargs)
    spec.max_episode_steps = max_episode_steps
    spec.additional_wrappers = ()
    return spec


# For `gymnasium.make_vec`, whose ids "module:name" import the module, which registers the names (`gymnasium.make` would
# put its own time limit around the env, which knows one row only).
for _task_id in REGISTERED_ENVS:
    _made_by = {"vector_entry_point": "envs.vector:make_vec", "kwargs": {"task_id": _task_id}}
    gym.register(f"{NAMESPACE}/{_task_id}", **_made_by)
