"""N rows of a ManiSkill task in one process on CPU cores, as a replacement for `gym.make`.

    import envs.vector

    env = envs.vector.make("PickCube-v1", num_envs=32, obs_mode="state", control_mode="pd_joint_delta_pos")
    vector_env = ManiSkillVectorEnv(env, record_metrics=True)  # ManiSkill's wrapper, with autoreset

`make` returns an env with the interface of ManiSkill's GPU envs and tensors on the CPU: `reset(seed, options)` with
options["env_idx"], `step(actions [N, A])`, info and observations with N rows.  Row i equals, bit for bit, a stock
single env that was built with seed 2022 + i and reset with the row's seed; an episode does not depend on earlier ones.
`reset()` without a seed draws one for each row from the row's generator and leaves torch's generator alone.
"""

from __future__ import annotations

import copy

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import OrderEnforcing
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import REGISTERED_ENVS, TimeLimitWrapper

from envs.batched.build import check_not_different, make_batched_task
from envs.batched.checks import check_num_envs
from envs.stock import action_dim, check_assets, check_name, explained, no_questions, task_actions
from rlinf_embodied.errors import ConfigError, SimulatorError

_NO_MATTER = ("render_mode", "render_backend", "reconfiguration_freq")  # to whether rows equal stock envs
_STATE_MODES = (None, "none", "state", "state_dict")
CPU_BACKENDS = ("auto", "cpu", "physx_cpu")


def make(
    task_id: str,
    num_envs: int = 1,
    *,
    max_episode_steps: int | None = None,
    sim_backend: str = "auto",
    num_threads: int = 1,
    decimate: bool = False,
    **kwargs: object,
) -> gym.Env:
    """Returns N rows of a ManiSkill task as one env, with ManiSkill's time limit.

    Args:
        task_id: a registered task.
        num_envs: rows N.
        max_episode_steps: env steps until truncation; None: the task's own.
        sim_backend: a name of ManiSkill's CPU backend, or "auto".
        num_threads: threads that step the scenes, with the same results.
        decimate: whether images show meshes with only as many triangles as their pixels can resolve (on a CPU an
            observation costs 1 ms then, and 40 with the original meshes).
        kwargs: as in `gym.make`, for the task class: obs_mode, control_mode, reward_mode, render_mode, sensor_configs,
            robot_uids, reconfiguration_freq, render_backend (default "cpu"; "none" where nothing is rendered), ...

    Raises:
        ConfigError: an unknown task or control mode, no rows, a backend that is not on the CPU, or render_mode="human".
        SimulatorError: assets are missing, or the task cannot be built or batched with these arguments.
    """
    check_name("task_id", task_id, REGISTERED_ENVS)
    check_num_envs(num_envs)
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

    def build(render_backend: object) -> BaseEnv:
        wanted = {**kwargs, "render_backend": render_backend}
        with no_questions(), explained("control_mode", f"{task_id} cannot be built with {wanted}"):
            return _batched(task_id, num_envs, num_threads, decimate, wanted)

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


def _batched(task_id: str, num_envs: int, num_threads: int, decimate: bool, kwargs: dict[str, object]) -> BaseEnv:
    """Returns the batched task after a trial: some tasks build well, but cannot be reset in part."""
    check_not_different(task_id, **{name: value for name, value in kwargs.items() if name not in _NO_MATTER})
    how = {"rows_alike": False, "num_threads": num_threads, "decimate": decimate}
    env = make_batched_task(task_id, num_envs, True, **how, **kwargs)
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
