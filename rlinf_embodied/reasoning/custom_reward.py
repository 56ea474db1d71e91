"""Calls reward._target_ for single completions or for lists: sequentially, in threads, or as coroutines."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import cast

import numpy as np

from rlinf_embodied.config import RewardConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, named_when_raised
from rlinf_embodied.telemetry.progress import report_progress

# (completion without its end token, problem) -> reward: a number, or a dict of numbers by name.  With
# reward.batch_size: (completions, problems) -> a list of these.  The function may be async.
RewardFunction = Callable[..., object]
_Rows = Sequence[tuple[str, Problem]]


def reward_function(config: RewardConfig) -> RewardFunction | None:
    """Returns the function that reward._target_ names, or None; raises a ConfigError if it cannot be called."""
    target = config._target_
    arguments = ("completions", "problems") if config.batch_size else ("completion", "problem")
    return None if target is None else load_plug_in(target, "reward._target_", *arguments)


class CustomReward:
    """Rewards of a function, by the names of reward.weights; a single number has the name ""."""

    def __init__(self, function: RewardFunction, config: RewardConfig) -> None:
        """Stores the function; `config` sets how many completions a call takes, and how many calls run at once."""
        self._function, self._batch_size, self._concurrency = function, config.batch_size, config.concurrency
        self._weights = config.weights or {"": 1.0}
        is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
        self._runner = asyncio.Runner() if is_async else None  # one event loop, so that connections stay open
        threads = config.concurrency > 1 and not is_async
        self._threads = ThreadPoolExecutor(config.concurrency, "reward") if threads else None

    def rewards(self, rows: _Rows) -> dict[str, np.ndarray]:
        """Returns the rewards of B (completion, problem) by name, float64 [B] each.

        Raises:
            ConfigError: the function raised, or returned something other than finite numbers with these names.
        """
        size, rewards = self._batch_size or 1, list[dict[str, float]]()
        calls = [rows[first : first + size] for first in range(0, len(rows), size)]
        if self._runner is not None:
            results = self._runner.run(self._await_all(calls))
        else:
            results = map(self._call, calls) if self._threads is None else self._threads.map(self._call, calls)
        for result in results:
            rewards += result
            report_progress()
        return {name: np.array([reward[name] for reward in rewards], np.float64) for name in self._weights}

    def weighted(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the weighted sum of named rewards, float32 [B]."""
        return np.asarray(sum(weight * rewards[name] for name, weight in self._weights.items()), np.float32)

    async def _await_all(self, calls: Sequence[_Rows]) -> list[list[dict[str, float]]]:
        semaphore = asyncio.Semaphore(self._concurrency)

        async def await_one(call: _Rows) -> list[dict[str, float]]:
            async with semaphore:
                with _user_errors(call):
                    result = await cast(Awaitable[object], self._function(*self._arguments(call)))
                report_progress()
                return self._checked(result, call)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(await_one(call)) for call in calls]
        except ExceptionGroup as errors:
            raise errors.exceptions[0]  # noqa: B904 (its cause is the function's error)
        return [task.result() for task in tasks]

    def _call(self, call: _Rows) -> list[dict[str, float]]:
        with _user_errors(call):
            result = self._function(*self._arguments(call))
        return self._checked(result, call)

    def _arguments(self, call: _Rows) -> tuple[object, object]:
        return ([text for text, _ in call], [problem for _, problem in call]) if self._batch_size else call[0]

    def _checked(self, result: object, call: _Rows) -> list[dict[str, float]]:
        """Returns the rewards of a call's completions, by name."""
        if not self._batch_size:
            return [self._named(result, *call[0])]
        rule = f"it returned that for {len(call)} completions (reward.batch_size), which need a list of as many rewards"
        fits = isinstance(result, Sequence | np.ndarray) and len(result) == len(call)
        require(fits, "reward._target_", result, rule, "return a number or a dict for every completion, in order")
        rewards = cast("Sequence[object]", result)
        return [self._named(reward, *row) for reward, row in zip(rewards, call, strict=True)]

    def _named(self, reward: object, completion: str, problem: Problem) -> dict[str, float]:
        named = reward if isinstance(reward, Mapping) else {"": reward}
        names = "a number" if "" in named else f"rewards named {', '.join(map(repr, named))}"
        rule, action = f"reward._target_ returned {names}", "give the weight of each name that it returns, 0 for none"
        weights = {name: weight for name, weight in self._weights.items() if name}
        require(named.keys() == self._weights.keys(), "reward.weights", weights, rule, action)
        try:
            numbers = {name: float(cast(float, value)) for name, value in named.items()}
        except (TypeError, ValueError):
            numbers = {"": math.nan}
        rule = f"it returned that for {_description(completion, problem)}, and a reward is a finite number"
        finite = all(map(math.isfinite, numbers.values()))
        require(finite, "reward._target_", reward, rule, "return one for every completion")
        return numbers


def _description(completion: str, problem: Problem) -> str:
    return f"{completion[:80]!r} as a completion of {problem.question[:80]!r}"


def _user_errors(call: _Rows) -> AbstractContextManager[None]:
    """Raises an error of the user's function as a ConfigError that names the first completion of the call."""
    more = f" and {len(call) - 1} more" if len(call) > 1 else ""
    name = f"reward._target_, called with {_description(*call[0])}{more}, raised"
    return named_when_raised(lambda raised: ConfigError(f"{name} {raised}\nCorrect the function"))
