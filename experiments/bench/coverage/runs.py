"""The comparisons behind the coverage table: one task, all its robots and control modes.

python -m experiments.bench.coverage.runs task=PickCube-v1 into=<file>.jsonl [robots=...] [modes=...]
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# ManiSkill annotates agents, robots and the physics system as their bases.

from __future__ import annotations

import gc
import inspect
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mani_skill
import numpy as np
import torch
from mani_skill.agents.registration import REGISTERED_AGENTS
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils import assets
from mani_skill.utils.registration import REGISTERED_ENVS
from sapien import physx
from torch import Tensor

from envs.batched.build import FAILURES, build_somehow, first_difference, make_batched_task, robot_name
from envs.comparison import Outcome, Pair, compare_episodes, simulated, wild_actions
from envs.maniskill import reward_mode
from envs.stock import build_task, check_assets, check_renderer, no_questions, task_actions
from envs.tasks import TaskView, expert_of
from rlinf_embodied.compose import compose, names_of
from rlinf_embodied.errors import ConfigError, SimulatorError

WHOLE_STEPS = 100  # of the first episode with a robot's default control mode, or the task's horizon if that is shorter
OTHER_STEPS = 24  # with other control modes
EXPERT_STEPS = 40  # where a scripted expert acts
SHORT_STEPS = 10  # in a large batch, and of tasks that are slow to build
SIZE = 32  # of pictures
INK, INK_STEPS = 45, 40  # a drawing task's dots take 20 ms each to build: fewer of them, in the stock envs too
SLOW_BUILD_S = 3.0  # such stock envs get a new scene for their later episodes instead of being built again
ROWS, OTHER_ROWS = 3, 2
ALSO = {2: None, 32: (0, 16, 31)}  # rows of other batches: those compared; sums over links depend on the number


def chosen_tasks(names: Sequence[str]) -> list[str]:
    """Returns the named tasks, or all.

    Raises:
        ConfigError: a name is no task.
    """
    unknown = [name for name in names if name not in REGISTERED_ENVS]
    if unknown:
        raise ConfigError(f"tasks has {', '.join(unknown)}, but ManiSkill knows no such task: leave it empty for all")
    return list(names) or sorted(REGISTERED_ENVS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    task: str = ""
    robots: str = ""
    modes: str = ""
    into: str = ""  # a JSON line per result


@dataclass(slots=True)
class Touches:
    """Wraps an action source and looks every few steps whether a robot pushes against something."""

    act: Callable[[int], Tensor]
    systems: Sequence[physx.PhysxCpuSystem]
    looked: int = 0
    touching: int = 0

    def __call__(self, step: int) -> Tensor:
        """Returns the actions of a step."""
        if step % 4 == 3:
            self.looked += len(self.systems)
            self.touching += sum(_pushes(system) for system in self.systems)
        return self.act(step)


def _pushes(system: physx.PhysxCpuSystem) -> bool:
    for contact in system.get_contacts():
        owners = [getattr(body, "articulation", None) for body in contact.bodies]
        if owners[0] is not owners[1] and any(np.any(point.impulse) for point in contact.points):
            return True
    return False


@dataclass(slots=True)
class Comparison:
    """One task with one robot."""

    task: str
    robot: object  # as ManiSkill takes it, None for the task's own
    checked: bool  # whether the short check is run too
    build_s: float = 0.0
    blind: str = "none"  # the render backend where no pictures are taken
    kwargs: dict[str, object] = field(default_factory=dict)  # what is not the default

    def modes(self) -> tuple[str, list[str]]:
        """Builds a stock env; returns the default control mode and the others."""
        start = time.process_time()
        env, self.blind = build_somehow(self.task, **self._arguments())
        self.build_s = time.process_time() - start
        agents = getattr(env.agent, "agents", None) or [env.agent]
        supported = [] if env.agent is None else agents[0].supported_control_modes
        default = "default" if env.agent is None else agents[0].control_mode
        env.close()
        return default, [mode for mode in supported if mode != default]

    def default_mode(self, mode: str) -> dict:
        """Compares whole episodes with pictures, and a large batch; says also what the short check finds."""
        start = time.monotonic()
        horizon = REGISTERED_ENVS[self.task].max_episode_steps or WHOLE_STEPS
        slow = self.build_s > SLOW_BUILD_S
        inked = hasattr(REGISTERED_ENVS[self.task].cls, "MAX_DOTS")
        steps = min(horizon, OTHER_STEPS if slow else INK_STEPS if inked else WHOLE_STEPS)
        runs = [partial(self._run, OTHER_ROWS if slow else ROWS, None, steps, pictures=True)]
        if not slow:
            runs += [partial(self._run, rows, compared, SHORT_STEPS) for rows, compared in ALSO.items()]
        short: dict = {}
        if not slow and self.checked:
            short = {"short_check": first_difference(self.task, reward_mode=reward_mode(self.task), **self._robot())}
        row = self._compared(runs) | {"horizon": horizon, "steps": steps, **short}
        return row | {"seconds": round(time.monotonic() - start, 1)}

    def other_mode(self, mode: str) -> dict:
        """Compares shorter episodes, state only."""
        start = time.monotonic()
        self.kwargs = {"control_mode": mode}
        try:
            env = self._stock()
            env.reset(seed=0)
            env.step(task_actions(env, wild_actions(env, 0)(0)))
            env.close()
        except FAILURES as error:
            return {"verdict": "not in stock", "reason": _why_not_built(error)}
        slow = self.build_s > SLOW_BUILD_S
        row = self._compared([partial(self._run, OTHER_ROWS, None, SHORT_STEPS if slow else OTHER_STEPS)])
        return row | {"seconds": round(time.monotonic() - start, 1)}

    def _compared(self, runs: list[Callable[[], dict]]) -> dict:
        """Returns the totals of all runs, or what differs in the first one that is not equal."""
        totals: dict = {}
        for run in runs:
            part = run()
            if part["difference"]:
                stock = "stock envs with one seed and the same actions differ from each other; "
                reason = stock * self._stock_envs_differ() + part["difference"]
                return {"verdict": "fallback", "reason": reason}
            totals = {name: totals.get(name, 0) + part[name] for name in part if name != "difference"}
        return {"verdict": "equal", "reason": "", **totals}

    def _stock_envs_differ(self) -> bool:
        """Whether a stock env draws from torch's global generator while it runs, or is not deterministic otherwise."""
        states = []
        for _ in range(2):
            env = self._stock()
            env.reset(seed=0)
            act = wild_actions(env, 0)
            for step in range(SHORT_STEPS):
                env.step(task_actions(env, act(step)))
            states.append(simulated(env.scene.px))
            env.close()
        return any(not torch.equal(states[0][name], states[1][name]) for name in states[0])

    def _run(self, rows: int, compared: Sequence[int] | None, steps: int, pictures: bool = False) -> dict:
        try:
            backend = "cpu" if pictures else self.blind
            batched = make_batched_task(self.task, rows, pictures, render_backend=backend, **self._arguments())
            touches = Touches(wild_actions(batched, seed=rows), batched.scene.px.systems)
            steps = self._let_expert_act(batched, touches, steps)
            build = partial(self._stock, render=pictures)
            anew = self.build_s < SLOW_BUILD_S and not self.kwargs
            pair = Pair(batched, build, anew, compared)
            outcome = compare_episodes(pair, steps, touches, pictures)
            pair.close()
        except FAILURES as error:
            text = str(error).strip().splitlines()
            return {"difference": f"{type(error).__name__}: {text[0] if text else ''}"}
        return _counts(outcome, touches)

    def _let_expert_act(self, batched: BaseEnv, touches: Touches, steps: int) -> int:
        view = TaskView(batched, True)
        expert = expert_of(self.task, view)
        if expert is None:
            return steps
        wild, steps = touches.act, max(steps, EXPERT_STEPS)
        touches.act = lambda step: expert(view) if step < steps else wild(step)
        return steps

    def _robot(self) -> dict[str, object]:
        return {} if self.robot is None else {"robot_uids": self.robot}

    def _arguments(self) -> dict[str, object]:
        fixed = {"obs_mode": "state_dict", "reward_mode": reward_mode(self.task)}
        return {**fixed, "sensor_configs": {"width": SIZE, "height": SIZE}, **self._robot(), **self.kwargs}

    def _stock(self, render: bool = False) -> BaseEnv:
        backend = {"sim_backend": "physx_cpu", "render_backend": "cpu" if render else self.blind}
        return build_task(self.task, num_envs=1, **backend, **self._arguments())


def _counts(outcome: Outcome, touches: Touches) -> dict:
    return {
        "difference": str(outcome),
        "row_steps": outcome.row_steps,
        "pictures": outcome.images,
        "looked": touches.looked,
        "touching": touches.touching,
    }


def compare_task(task: str, robots: Sequence[str], modes: Sequence[str]) -> Iterator[dict]:
    """Yields a JSON object per robot and control mode, or one with a reason if there is nothing to compare."""
    torch.set_num_threads(1)
    gc.freeze()  # ManiSkill collects garbage whenever an env is built or closed, 0.2 s among all that was imported
    mani_skill.logger.setLevel(logging.ERROR)
    check_renderer("cpu")  # a task that loads a texture before any renderer exists would get one on another device
    try:
        check_assets("tasks", task)
    except SimulatorError:
        yield {"reason": f"needs `python -m mani_skill.utils.download_asset {task}`"}
        return
    with no_questions():
        cls = REGISTERED_ENVS[task].cls
        takes_robots = "robot_uids" in inspect.signature(cls.__init__).parameters
        default, supported = None, cls.SUPPORTED_ROBOTS if takes_robots else None
        if hasattr(cls, "MAX_DOTS"):
            cls.MAX_DOTS = INK
        try:
            env, _ = build_somehow(task)
            default = env.robot_uids
            env.close()
            yield {"default_robot": robot_name(default)}
        except FAILURES as error:
            if not supported:
                yield {"reason": _why_not_built(error)}
                return
        for robot in supported or [default]:
            if not robots or robot_name(robot) in robots:
                yield from _compare_robot(task, robot, robot == default, modes)


def _why_not_built(error: Exception) -> str:
    """Returns the command that downloads what is missing, otherwise what was raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    sources = [name for name, source in assets.DATA_SOURCES.items() if f"/{source.target_path}/" in text]
    robot = re.match(r"Robot (\S+) has assets", text)
    if robot:
        sources = list(REGISTERED_AGENTS[robot[1]].asset_download_ids)
    if sources:
        return f"needs `python -m mani_skill.utils.download_asset {sources[0]}`"
    return f"stock ManiSkill raises {type(error).__name__}: {text}"


def _compare_robot(task: str, robot: object, is_default: bool, modes: Sequence[str]) -> Iterator[dict]:
    name = {"robot": robot_name(robot)}
    comparison = Comparison(task, None if is_default else robot, is_default)
    try:
        default, others = comparison.modes()
    except FAILURES as error:
        verdict = "needs files" if isinstance(error, FileNotFoundError | ImportError) else "not in stock"
        yield {**name, "mode": "default", "verdict": verdict, "reason": _why_not_built(error)}
        return
    if not modes or default in modes:
        yield {**name, "mode": default, "default": True, **comparison.default_mode(default)}
    for mode in others:
        if not modes or mode in modes:
            yield {**name, "mode": mode, **comparison.other_mode(mode)}


def main(arguments: Sequence[str]) -> None:
    """Compares one task; what is found is written as it comes."""
    own = compose(Options, arguments)
    with Path(own.into).open("w") as stream:
        for line in compare_task(own.task, names_of(own.robots), names_of(own.modes)):
            stream.write(json.dumps(line) + "\n")
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
