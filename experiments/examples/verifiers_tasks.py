"""Tasks of the library verifiers (`pip install verifiers`), as problems and an agent.

`data.level` is the id of a taskset with its settings, as "textarena game=Wordle-v0":

python experiments/train_llm_math.py policy=folder policy.folder=<dir> data.prompt_template=natural \\
    data._target_=experiments.examples.verifiers_tasks.Tasks data.level=<taskset> \\
    agent._target_=experiments.examples.verifiers_tasks.episode

The environment runs in this process with its own rollout loop and rewards; its requests pass through the server that
records its traces to `base_url`.  Environments with tools, containers or several agents are refused.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

from experiments.examples.environments import ask
from rlinf_embodied.config import DataConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of

_MOST_TASKS = 1000  # of a taskset without end


class _Chat(vf.Harness[vf.HarnessConfig]):
    """A request per turn, as the library's harness `null` without tools makes it, but in this process."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        chat = [{"role": "system", "content": system}] if system else []
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        await asyncio.to_thread(ask, endpoint, [*chat, *map(message_to_wire, said)], secret)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _environment(level: str) -> vf.Env:
    """Returns the environment of a taskset, whose one agent chats in this process."""
    name, *settings = level.split()
    kind = loaders.env_config_type(name)
    seats = [seat for seat, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    rule, action = f"its environment has the agents {', '.join(seats)}", "use a taskset whose environment has one"
    require(len(seats) == 1, "data.level", level, rule, action)
    taskset = {"id": name, **dict(setting.split("=", 1) for setting in settings)}
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = loaders.load_environment(loaders.resolve_env_config({"taskset": taskset, seats[0]: agent}))
    own = env.setup

    async def setup(agents: Any) -> None:
        await own(agents)
        getattr(agents, seats[0]).harness = _Chat(vf.HarnessConfig(id="null"))

    env.setup = setup
    return env


@functools.cache
def _tasks(level: str, seed: int) -> dict[Split, list[vf.TaskData]]:
    """Returns the tasks of a taskset by split, shuffled; those of equal content are in one split."""
    taskset, found = _environment(level).taskset, {split: list[vf.TaskData]() for split in Split}
    for task in (taskset if taskset.bounded else taskset.take(_MOST_TASKS)).shuffle(seed):
        found[split_of(task.data.model_dump_json(exclude={"idx"}))].append(task.data)
    return found


class Tasks:
    """The tasks of a taskset as problems; after the last one of a split comes its first."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._level, self._tasks = data.level, _tasks(data.level, seed)

    def size(self, split: Split) -> int:
        return len(self._tasks[split])

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        own, rule = self._tasks[split], f"none of its tasks is in the split {split.value!r}"
        require(bool(own), "data.level", self._level, rule, "use a taskset with some hundred tasks")
        return [self._problem(problem_id(split, n), own[n % len(own)]) for n in range(start, start + count)]

    def _problem(self, number: int, task: vf.TaskData) -> Problem:
        return Problem(number, task.prompt_text, "", None, "text", self._level, {"task": task})


def episode(problem: Problem, base_url: str) -> float:
    """Runs an episode of the environment, and returns its reward.

    Raises:
        RuntimeError: the episode failed, for a reason that the message names.
    """
    return asyncio.run(_episode(problem.level, cast(vf.TaskData, problem.columns["task"]), base_url))


async def _episode(level: str, data: vf.TaskData, base_url: str) -> float:
    env = _environment(level)
    task = type(env.taskset).task_type()(data, env.config.taskset.task)
    endpoint = vf.EvalClientConfig(base_url=base_url, api_key_var="NO_KEY")
    async with env.serving():
        found = await env.run_episode(task, vf.ModelContext("policy", endpoint))
    errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
    if not found.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    return sum(trace.reward for trace in found.traces)
