"""Calls reward._target_: for one completion or for lists of them; one call after the other, in threads, or awaited."""

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

# (completion without its ending token, problem) -> what it earns: a number, or a dict of numbers by name.  With
# reward.batch_size it is (completions, problems) -> a list of these.  An async function returns them when awaited.
RewardFunction = Callable[..., object]
_Rows = Sequence[tuple[str, Problem]]


def reward_function(config: RewardConfig) -> RewardFunction | None:
    """Returns the function that reward._target_ names, None otherwise.

    Raises:
        ConfigError: it cannot be imported, or does not take (completion, problem) or, in batches, lists of them.
    """
    if config._target_ is None:
        return None
    arguments = ("completions", "problems") if config.batch_size else ("completion", "problem")
    return load_plug_in(config._target_, "reward._target_", *arguments)


class CustomReward:
    """What a function gives to completions, by the names of reward.weights; a single number has the name ""."""

    def __init__(self, function: RewardFunction, config: RewardConfig) -> None:
        """Takes the function and how to call it; `concurrency` calls run at once."""
        self._function, self._batch_size, self._concurrency = function, config.batch_size, config.concurrency
        self._weights = config.weights or {"": 1.0}
        is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
        self._runner = asyncio.Runner() if is_async else None  # one event loop, which may keep connections
        threads = config.concurrency > 1 and not is_async
        self._threads = ThreadPoolExecutor(config.concurrency, "reward") if threads else None

    def earned(self, rows: _Rows) -> dict[str, np.ndarray]:
        """Returns the rewards of B (completion, problem) by name, float64 [B] each.

        Raises:
            ConfigError: the function raised, or returned something else than finite numbers of these names.
        """
        size, found = self._batch_size or 1, list[dict[str, float]]()
        calls = [rows[first : first + size] for first in range(0, len(rows), size)]
        if self._runner is not None:
            parts = self._runner.run(self._gathered(calls))
        else:
            parts = map(self._called, calls) if self._threads is None else self._threads.map(self._called, calls)
        for part in parts:
            found += part
            report_progress()
        return {name: np.array([one[name] for one in found], np.float64) for name in self._weights}

    def weighted(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns their weighted sum, float32 [B]."""
        return np.asarray(sum(weight * rewards[name] for name, weight in self._weights.items()), np.float32)

    async def _gathered(self, calls: Sequence[_Rows]) -> list[list[dict[str, float]]]:
        at_once = asyncio.Semaphore(self._concurrency)

        async def one(call: _Rows) -> list[dict[str, float]]:
            async with at_once:
                with _raising(call):
                    found = await cast(Awaitable[object], self._function(*self._arguments(call)))
                report_progress()
                return self._checked(found, call)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
        except ExceptionGroup as errors:
            raise errors.exceptions[0]  # noqa: B904 (its cause is what the function raised)
        return [task.result() for task in tasks]

    def _called(self, call: _Rows) -> list[dict[str, float]]:
        with _raising(call):
            found = self._function(*self._arguments(call))
        return self._checked(found, call)

    def _arguments(self, call: _Rows) -> tuple[object, object]:
        return ([text for text, _ in call], [problem for _, problem in call]) if self._batch_size else call[0]

    def _checked(self, found: object, call: _Rows) -> list[dict[str, float]]:
        if not self._batch_size:
            return [self._numbers(found, *call[0])]
        rule = f"it returned that for {len(call)} completions (reward.batch_size), which earn a list of as many rewards"
        whole = isinstance(found, Sequence | np.ndarray) and len(found) == len(call)
        require(whole, "reward._target_", found, rule, "return a number or a dict for every completion, in order")
        return [self._numbers(one, *row) for one, row in zip(cast("Sequence[object]", found), call, strict=True)]

    def _numbers(self, found: object, completion: str, problem: Problem) -> dict[str, float]:
        named = found if isinstance(found, Mapping) else {"": found}
        names = "a number" if "" in named else f"rewards named {', '.join(map(repr, named))}"
        rule, action = f"reward._target_ returned {names}", "give the weight of each name that it returns, 0 for none"
        known = {name: weight for name, weight in self._weights.items() if name}
        require(named.keys() == self._weights.keys(), "reward.weights", known, rule, action)
        try:
            numbers = {name: float(cast(float, value)) for name, value in named.items()}
        except (TypeError, ValueError):
            numbers = {"": math.nan}
        rule = f"it returned that for {_about(completion, problem)}, which earns a finite number"
        finite = all(map(math.isfinite, numbers.values()))
        require(finite, "reward._target_", found, rule, "return one for every completion")
        return numbers


def _about(completion: str, problem: Problem) -> str:
    return f"{completion[:80]!r} as a completion of {problem.question[:80]!r}"


def _raising(call: _Rows) -> AbstractContextManager[None]:
    others = f" and {len(call) - 1} others" if len(call) > 1 else ""
    refused = f"reward._target_, asked about {_about(*call[0])}{others}, raised"
    return named_when_raised(lambda raised: ConfigError(f"{refused} {raised}\nCorrect it there"))
