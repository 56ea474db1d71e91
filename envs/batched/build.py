"""Builds N CPU rows of a ManiSkill task, and compares them with stock single envs, which they must equal.

The results of a long comparison (`experiments.bench.coverage`) for the installed versions are in `covered.json`; any
other task is compared for a few steps, once per machine.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mani_skill.agents.base_agent import BaseAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import REGISTERED_ENVS

from envs.batched.checks import check_num_envs, check_versions
from envs.batched.rendering import open_renderer
from envs.batched.rotations import few_operations
from envs.batched.seeds import DRAWS_BY_ROW
from envs.batched.task import BatchedTask
from envs.comparison import Pair, compare_episodes, wild_actions
from envs.stock import BUILD_ERRORS, build_task, overrides
from rlinf_embodied.cache import cached
from rlinf_embodied.errors import SimulatorError

logger = logging.getLogger(__name__)

SMALL, LARGE = {2: (0, 1)}, {16: (0, 7, 15)}  # rows of a batch: those compared; sums over links depend on the number
STEPS = 10
SLOW_BUILD_S = 3.0  # where a single env takes longer to build, no large batch is built to compare
COVERED = Path(__file__).with_name("covered.json")
FAILURES = (*BUILD_ERRORS, SimulatorError)
_SINGLE = {"num_envs": 1, "sim_backend": "physx_cpu"}
_ANY_VALUE = ("sensor_configs", "human_render_camera_configs", "viewer_camera_configs", "obs_mode")  # rows stay alike


def make_batched_task(
    task_id: str,
    num_envs: int,
    render: bool,
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
        rows_alike: whether every row is built with the seed of a stock single env, or row i with ManiSkill's for row i
            (which matters for tasks that draw sizes or models when they are built).
        num_threads: threads that step the scenes, with the same results.
        decimate: whether images show lighter meshes, see decimate.py.
        kwargs: for the task class, for example control_mode, reward_mode, sensor_configs, robot_uids.

    Raises:
        ConfigError: no rows.
        SimulatorError: the batched backend was not tested with the installed ManiSkill or SAPIEN.
    """
    check_num_envs(num_envs)
    check_versions()
    spec = REGISTERED_ENVS[task_id]
    attributes = {name: few_operations()(getattr(spec.cls, name)) for name in ("get_info", "get_obs", "get_reward")}
    attributes |= {
        "_task_class": spec.cls,
        "_draws_by_row": task_id in DRAWS_BY_ROW,
        "_rows_alike": rows_alike,
        "_num_threads": num_threads,
        "_decimate": decimate,
    }
    hooks = ("_before_simulation_step", "_after_simulation_step", "_after_control_step")
    attributes |= {name: _with_tensors(getattr(spec.cls, name)) for name in hooks if overrides(spec.cls, name)}
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
    """Returns a task's hook that brings the tensors up to date first: stock CPU envs have nothing to fetch."""

    def method(task: BaseEnv) -> None:
        task.scene._gpu_apply_all()
        task.scene._gpu_fetch_all()
        hook(task)

    return method


def check_equal(task_id: str, **kwargs: object) -> None:
    """Raises SimulatorError, with the difference, where batched rows of a task are not known to equal stock envs.

    `kwargs` are for the task class, for example control_mode, reward_mode, robot_uids.
    """
    check_versions()
    kwargs = {name: value for name, value in kwargs.items() if name not in _ANY_VALUE and value is not None}
    known = _covered(task_id, kwargs)
    difference = _remembered(task_id, kwargs) if known is None else known
    if difference:
        raise SimulatorError(f"{task_id} on the batched CPU backend: {difference}: use env.backend=stock")


def first_difference(task_id: str, **kwargs: object) -> str:
    """Compares rows with stock envs for some steps; returns what differs first, "" if nothing does."""
    with suppress(RuntimeError):  # without a renderer there will be no images either
        open_renderer("cpu")
    start = time.process_time()
    first, backend = build_somehow(task_id, **{**kwargs, "obs_mode": "state_dict"})
    slow = time.process_time() - start > SLOW_BUILD_S
    wanted = {**kwargs, "obs_mode": "state_dict", "render_backend": backend}
    stock = [first]

    def next_stock() -> BaseEnv:
        return stock.pop() if stock else build_task(task_id, **wanted, **_SINGLE)

    try:
        for num_rows, compared in (SMALL if slow else SMALL | LARGE).items():
            batched = make_batched_task(task_id, num_rows, False, **wanted)
            pair = Pair(batched, next_stock, anew=not slow, compared=compared)
            outcome = compare_episodes(pair, STEPS, wild_actions(batched, seed=0))
            pair.close()
            if outcome.differences:
                return f"{outcome} ({num_rows} rows)"
    except FAILURES as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return ""


def build_somehow(task_id: str, **kwargs: object) -> tuple[BaseEnv, str]:
    """Returns a stock single env and its render backend: none, unless the task cannot be built without a renderer."""
    try:
        return build_task(task_id, **kwargs, **_SINGLE, render_backend="none"), "none"
    except BUILD_ERRORS:  # PushT, for example, looks its visual bodies up
        return build_task(task_id, **kwargs, **_SINGLE, render_backend="cpu"), "cpu"


@cache
def _table() -> dict:
    return json.loads(COVERED.read_text()) if COVERED.exists() else {"versions": None, "tasks": {}}


def versions() -> dict[str, str]:
    """Returns the versions that a comparison holds for."""
    return {name: version(name) for name in ("mani_skill", "sapien")}


def _covered(task_id: str, kwargs: Mapping[str, object]) -> str | None:
    """Returns the difference that the table lists, "" for none; None where it does not list the combination."""
    if _table()["versions"] != versions() or not kwargs.keys() <= {"control_mode", "robot_uids", "reward_mode"}:
        return None
    if not REGISTERED_ENVS[task_id].cls.__module__.startswith("mani_skill."):
        return None
    robots = _table()["tasks"].get(task_id, {})
    modes = robots.get(robot_name(kwargs.get("robot_uids")), {})
    return modes.get(kwargs.get("control_mode") or "default")


def robot_name(robot_uids: str | type[BaseAgent] | Sequence | None) -> str:
    """Returns the table's name of robots."""
    if robot_uids is None:
        return "default"
    if isinstance(robot_uids, list | tuple):
        return "+".join(robot_name(each) for each in robot_uids)
    return robot_uids if isinstance(robot_uids, str) else robot_uids.uid


def _remembered(task_id: str, kwargs: Mapping[str, object]) -> str:
    """Compares once per machine, versions, source of the task and source of this package."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(inspect.getsourcefile(REGISTERED_ENVS[task_id].cls))]
    facts = [task_id, sorted((k, str(v)) for k, v in kwargs.items()), versions(), [p.read_text() for p in sources]]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def write(path: Path) -> None:
        logger.info("comparing %s with stock ManiSkill, once on this machine", task_id)
        path.write_text(json.dumps(first_difference(task_id, **kwargs)))

    return json.loads(cached(f"differences/{digest}.json", write).read_text())
