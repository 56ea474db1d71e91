"""The comparisons behind the coverage table: one task, all its robots and control modes."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# ManiSkill annotates agents, robots and the physics system as their bases.

from __future__ import annotations

import gc
import inspect
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import mani_skill
import torch
from mani_skill.utils.registration import REGISTERED_ENVS

from envs.batched.build import FAILURES, make_batched_task, robot_name
from envs.maniskill_rows import reward_mode
from envs.stock import BUILD_ERRORS, build_task, check_assets, check_name, check_renderer, no_questions, task_actions
from envs.tasks import TaskView, expert_of
from experiments.bench.coverage.comparison import Pair, compare_episodes, wild_actions

WHOLE_STEPS = 100  # of the first episode with a robot's default control mode, or the task's horizon if that is shorter
OTHER_STEPS = 24  # with other control modes
EXPERT_STEPS = 40  # where a scripted expert acts
LARGE, LARGE_STEPS = {32: (0, 16, 31)}, 10  # rows of a batch: those compared; sums over links depend on the number
SIZE = 32  # of images
SLOW_BUILD_S = 3.0  # such stock envs get a new scene for their later episodes instead of being built again
ROWS, OTHER_ROWS = 3, 2
ALSO = "panda_wristcam"  # where tasks list the panda: this project's presets use it


def chosen_tasks(names: Sequence[str]) -> list[str]:
    """Returns the named tasks, or all; raises ConfigError if a name is no task."""
    for name in names:
        check_name("tasks", name, REGISTERED_ENVS)
    return list(names) or sorted(REGISTERED_ENVS)


class Comparison:
    """One task with one robot."""

    def __init__(self, task: str, robot: object) -> None:
        """Builds a stock env to learn its control modes; `robot` is ManiSkill's robot_uids, None for the default."""
        self._task = task
        self._robot = {} if robot is None else {"robot_uids": robot}
        start = time.process_time()
        env, self._blind = _built(task, self._arguments())
        self._slow = time.process_time() - start > SLOW_BUILD_S
        agents = getattr(env.agent, "agents", None) or [env.agent]
        supported = [] if env.agent is None else agents[0].supported_control_modes
        self.default = "default" if env.agent is None else agents[0].control_mode
        self.others = [mode for mode in supported if mode != self.default]
        env.close()

    def difference(self, mode: str) -> str | None:
        """Returns what differs from stock, "" for nothing, None where stock ManiSkill itself raises."""
        if mode == self.default:
            horizon = REGISTERED_ENVS[self._task].max_episode_steps or WHOLE_STEPS
            steps = min(horizon, OTHER_STEPS if self._slow else WHOLE_STEPS)
            difference = self._run(OTHER_ROWS if self._slow else ROWS, None, steps, images=True)
            for rows, compared in () if difference or self._slow else LARGE.items():
                difference = difference or self._run(rows, compared, LARGE_STEPS)
            return difference
        try:
            env = self._stock(mode)
            env.reset(seed=0)
            env.step(task_actions(env, wild_actions(env, 0)(0)))
            env.close()
        except FAILURES:
            return None
        return self._run(OTHER_ROWS, None, LARGE_STEPS if self._slow else OTHER_STEPS, mode=mode)

    def _run(
        self, rows: int, compared: Sequence[int] | None, steps: int, images: bool = False, mode: str | None = None
    ) -> str:
        try:
            backend = "cpu" if images else self._blind
            batched = make_batched_task(self._task, rows, images, render_backend=backend, **self._arguments(mode))
            act, view = wild_actions(batched, seed=rows), TaskView(batched, True)
            if expert := expert_of(self._task, view):
                wild, steps = act, max(steps, EXPERT_STEPS)
                act = lambda step: expert(view) if step < steps else wild(step)  # noqa: E731
            anew = not self._slow and mode is None
            pair = Pair(batched, lambda: self._stock(mode, images), anew, compared)
            difference = compare_episodes(pair, steps, act, images)
            pair.close()
        except FAILURES as error:
            text = str(error).strip().splitlines()
            return f"{type(error).__name__}: {text[0] if text else ''}"
        return difference

    def _arguments(self, mode: str | None = None) -> dict[str, object]:
        chosen = {"control_mode": mode} if mode else {}
        fixed = {"obs_mode": "state_dict", "reward_mode": reward_mode(self._task)}
        return {**fixed, "sensor_configs": {"width": SIZE, "height": SIZE}, **self._robot, **chosen}

    def _stock(self, mode: str | None = None, render: bool = False):
        backend = {"sim_backend": "physx_cpu", "render_backend": "cpu" if render else self._blind}
        return build_task(self._task, num_envs=1, **backend, **self._arguments(mode))


def _built(task: str, arguments: dict[str, object]):
    """Returns a stock single env and its render backend: none, unless the task cannot be built without a renderer."""
    single = {"num_envs": 1, "sim_backend": "physx_cpu", **arguments}
    try:
        return build_task(task, **single, render_backend="none"), "none"
    except BUILD_ERRORS:  # PushT, for example, looks its visual bodies up
        return build_task(task, **single, render_backend="cpu"), "cpu"


def compare_task(task: str) -> Iterator[dict]:
    """Yields the result of each robot and control mode that stock ManiSkill can run on this machine."""
    torch.set_num_threads(1)
    gc.freeze()  # ManiSkill collects garbage whenever an env is built or closed, 0.2 s among all that was imported
    mani_skill.logger.setLevel(logging.ERROR)
    check_renderer("cpu")  # a task that loads a texture before any renderer exists would get one on another device
    check_assets("tasks", task)
    with no_questions():
        cls = REGISTERED_ENVS[task].cls
        env, _ = _built(task, {})
        default = env.robot_uids
        env.close()
        takes_robots = "robot_uids" in inspect.signature(cls.__init__).parameters
        robots = (cls.SUPPORTED_ROBOTS if takes_robots else None) or [default]
        for robot in [*robots, *(ALSO for each in robots if each == "panda" and ALSO not in robots)]:
            names = [robot_name(robot)] + ["default"] * (robot == default)
            try:
                comparison = Comparison(task, None if robot == default else robot)
            except FAILURES as error:
                print(f"{task} with {names[0]} is not in stock ManiSkill: {error}", file=sys.stderr)
                continue
            for mode in (comparison.default, *comparison.others):
                modes = [mode] + ["default"] * (mode == comparison.default)
                difference = comparison.difference(mode)
                if difference is not None:
                    yield {"robots": names, "modes": modes, "reason": difference}


def write_differences(task: str, into: Path) -> None:
    """Compares one task; writes a line of JSON per result as it comes."""
    with into.open("w") as stream:
        for line in compare_task(task):
            stream.write(json.dumps(line) + "\n")
            stream.flush()
