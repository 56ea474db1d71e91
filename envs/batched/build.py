"""Builds N CPU rows of a ManiSkill task, and looks up whether they equal stock single envs.

`covered.json` holds the results of `experiments.bench.coverage` with the tested versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mani_skill.agents.base_agent import BaseAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import REGISTERED_ENVS

from envs.batched.rotations import few_operations
from envs.batched.seeds import DRAWS_BY_ROW
from envs.batched.task import BatchedTask
from envs.stock import BUILD_ERRORS, overrides
from rlinf_embodied.errors import SimulatorError

TESTED_VERSIONS = {"mani_skill": ("3.0.1",), "sapien": ("3.0.3",)}  # their internals are relied on
COVERED = Path(__file__).with_name("covered.json")
FAILURES = (*BUILD_ERRORS, SimulatorError)
_ANY_VALUE = ("sensor_configs", "human_render_camera_configs", "viewer_camera_configs", "obs_mode")  # rows stay equal


def make_batched_task(task_id: str, num_envs: int, render: bool, **kwargs: object) -> BaseEnv:
    """Returns N CPU rows of a registered ManiSkill task as one env object whose tensors have N rows.

    Args:
        task_id: a registered task.
        num_envs: rows N.
        render: whether renderers are set up.
        kwargs: for the task class, for example control_mode, reward_mode, sensor_configs, robot_uids.

    Raises:
        SimulatorError: the batched backend was not tested with the installed ManiSkill or SAPIEN.
    """
    check_versions()
    spec = REGISTERED_ENVS[task_id]
    attributes = {name: few_operations()(getattr(spec.cls, name)) for name in ("get_info", "get_obs", "get_reward")}
    attributes |= {"_task_class": spec.cls, "_draws_by_row": task_id in DRAWS_BY_ROW}
    hooks = ("_before_simulation_step", "_after_simulation_step", "_after_control_step")
    attributes |= {name: _with_tensors(getattr(spec.cls, name)) for name in hooks if overrides(spec.cls, name)}
    cls = type(f"Batched{spec.cls.__name__}", (BatchedTask, spec.cls), attributes)
    usual = {"obs_mode": "none", "render_backend": "cpu" if render else "none", "reconfiguration_freq": 0}
    fixed = {"num_envs": num_envs, "sim_backend": "physx_cpu"}
    return cls(**{**(spec.default_kwargs or {}), **usual, **kwargs, **fixed})


def check_versions() -> None:
    """Raises SimulatorError if the batched backend was not tested with the installed ManiSkill or SAPIEN."""
    for package, tested in TESTED_VERSIONS.items():
        installed = version(package)
        if installed not in tested:
            raise SimulatorError(
                f"{package} {installed} is installed, but the batched CPU backend was tested with {package} "
                f"{' and '.join(tested)} only: install `{package}=={tested[-1]}`, or use stock envs "
                "(env.options.backend=stock)"
            )


def _with_tensors(hook: Callable[[BaseEnv], None]) -> Callable[[BaseEnv], None]:
    """Returns a task's hook that updates the tensors first; stock CPU envs have nothing to fetch."""

    def method(task: BaseEnv) -> None:
        task.scene._gpu_apply_all()
        task.scene._gpu_fetch_all()
        hook(task)

    return method


def known_difference(task_id: str, **kwargs: object) -> str | None:
    """Returns how batched rows of a task differ from stock envs, "" if they are equal, None if they were not compared.

    Args:
        task_id: a registered task.
        kwargs: for the task class, for example control_mode, reward_mode, robot_uids.

    Raises:
        SimulatorError: the batched backend was not tested with the installed ManiSkill or SAPIEN.
    """
    check_versions()
    kwargs = {name: value for name, value in kwargs.items() if name not in _ANY_VALUE and value is not None}
    if _table()["versions"] != versions() or not kwargs.keys() <= {"control_mode", "robot_uids", "reward_mode"}:
        return None
    if not REGISTERED_ENVS[task_id].cls.__module__.startswith("mani_skill."):
        return None
    robots = _table()["tasks"].get(task_id, {})
    modes = robots.get(robot_name(kwargs.get("robot_uids")), {})
    return modes.get(kwargs.get("control_mode") or "default")


@cache
def _table() -> dict:
    return json.loads(COVERED.read_text()) if COVERED.exists() else {"versions": None, "tasks": {}}


def versions() -> dict[str, str]:
    """Returns the versions that a comparison holds for."""
    return {name: version(name) for name in ("mani_skill", "sapien")}


def robot_name(robot_uids: str | type[BaseAgent] | Sequence | None) -> str:
    """Returns the name of robots in the table."""
    if robot_uids is None:
        return "default"
    if isinstance(robot_uids, list | tuple):
        return "+".join(robot_name(each) for each in robot_uids)
    return robot_uids if isinstance(robot_uids, str) else robot_uids.uid
