"""Builds N CPU rows of a ManiSkill task."""

from __future__ import annotations

from collections.abc import Callable

from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import REGISTERED_ENVS

from envs.batched.checks import check_num_envs, check_versions
from envs.batched.few_operations import few_operations
from envs.batched.seeds import DRAWS_BY_ROW
from envs.batched.single import Alone, rowwise_methods
from envs.batched.task import BatchedTask
from envs.stock import build_task, overrides


def make_batched_task(
    task_id: str,
    num_envs: int,
    render: bool,
    alone: Alone = Alone.nothing,
    rows_alike: bool = True,
    num_threads: int = 1,
    decimate: bool = False,
    **kwargs: object,
) -> BaseEnv:
    """Returns N CPU rows of a registered ManiSkill task as one env object whose tensors have N rows.

    Args:
        task_id: a registered task.
        num_envs: rows N.
        render: whether renderers are set up.
        alone: what of the task's own code runs row by row.
        rows_alike: whether every row is built with the seed of a stock single env, or row i with ManiSkill's for row i
            (which matters for tasks that draw sizes or models when they are built).
        num_threads: threads that step the scenes, with the same results.
        decimate: whether images show lighter meshes, see decimate.py.
        kwargs: for the task class, for example control_mode, reward_mode, sensor_configs, robot_uids.

    Raises:
        ConfigError: no rows.
        SimulatorError: the installed ManiSkill or SAPIEN is not one that the batched route knows.
    """
    check_num_envs(num_envs)
    check_versions()
    spec = REGISTERED_ENVS[task_id]
    attributes = {name: few_operations()(getattr(spec.cls, name)) for name in ("get_info", "get_obs", "get_reward")}
    attributes |= {
        "_alone": alone,
        "_task_class": spec.cls,
        "_draws_by_row": task_id in DRAWS_BY_ROW,
        "_rows_alike": rows_alike,
        "_num_threads": num_threads,
        "_decimate": decimate,
    }
    hooks = ("_before_simulation_step", "_after_simulation_step", "_after_control_step")
    attributes |= {name: _with_tensors(getattr(spec.cls, name)) for name in hooks if overrides(spec.cls, name)}
    if alone is not Alone.nothing:
        single = {**kwargs, "sim_backend": "physx_cpu", "num_envs": 1, "reconfiguration_freq": 0}
        attributes["_stock_single"] = build_task(task_id, **{"render_backend": "cpu" if render else "none", **single})
    if alone is Alone.everything:
        attributes |= rowwise_methods(spec.cls)
    cls = type(f"Batched{spec.cls.__name__}", (BatchedTask, spec.cls), attributes)
    return cls(
        **{
            **(spec.default_kwargs or {}),
            "num_envs": num_envs,
            "obs_mode": "none",
            "render_backend": "cpu" if render else "none",
            "reconfiguration_freq": 0,
            **kwargs,
            "sim_backend": "physx_cpu",
        }
    )


def _with_tensors(hook: Callable[[BaseEnv], None]) -> Callable[[BaseEnv], None]:
    """Returns a task's hook before which the tensors are brought up to date: stock CPU envs have nothing to fetch."""

    def method(task: BaseEnv) -> None:
        task.scene._gpu_apply_all()
        task.scene._gpu_fetch_all()
        hook(task)

    return method
