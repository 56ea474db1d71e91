"""Rewards: which completions are right, or what a function of the user's says they earn.

What is right is a pure function of (completion, problem): `answers.py` decides by the texts alone wherever it can, and
bounds what is left for math-verify, which runs under a limit of processor time (not of the clock) in
`verifier_pool.py`.  For references that are numbers, and for countdown, nothing is left that a limit could cut short.
A function of the user's (reward._target_) replaces all that, and runs in the caller's process, without a limit; several
calls of it at once in threads, if it waits for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import numpy as np

from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, named_when_raised
from rlinf_embodied.reasoning.answers import decide, solves
from rlinf_embodied.reasoning.verifier_pool import VerifierPool
from rlinf_embodied.telemetry.progress import report_progress

RewardFunction = Callable[[str, Problem], float]  # (completion without its ending token, problem) -> what it earns
_RIGHT = 1.0  # what a function gives a right answer, at least


def reward_function(config: RewardConfig) -> RewardFunction | None:
    """Returns the function that reward._target_ names, None otherwise.

    Raises:
        ConfigError: it cannot be imported, or does not take (completion, problem).
    """
    if config._target_ is None:
        return None
    return cast(RewardFunction, load_plug_in(config._target_, "reward._target_", "completion", "problem"))


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found about B completions, in their order."""

    correct: np.ndarray  # bool [B]: the final answer is right and the completion came to its end
    formatted: np.ndarray  # bool [B]: it came to its end and follows the template
    raw: np.ndarray  # float32 [B]: 1 where correct, or the value of the user's function; 0 where it did not end
    rewards: np.ndarray  # float32 [B]: raw + format_reward * formatted


class Verifier:
    """Verifies completions of one prompt template; a context manager.

    Its processes start when a first answer needs them, on the machine where it is called.  One caller at a time.
    """

    def __init__(
        self,
        template: PromptTemplate,
        *,
        num_workers: int = 1,
        timeout_s: float = 2.0,
        format_reward: float = 0.0,
        function: RewardFunction | None = None,
        concurrency: int = 1,
    ) -> None:
        """Starts nothing yet.

        Args:
            template: how completions are written.
            num_workers: processes for math-verify, at most.
            timeout_s: processor seconds that one answer may take.
            format_reward: what a completion in the right format earns, right or wrong.
            function: says what a completion earns in place of the problem's answer; 1 and more count as right.
            concurrency: calls of the function at once, in threads.
        """
        self._template, self._format_reward, self._function = template, format_reward, function
        self._threads = ThreadPoolExecutor(concurrency, "reward") if concurrency > 1 else None
        self._pool = VerifierPool(num_workers, timeout_s)

    @classmethod
    def of(cls, reward: RewardConfig, template: PromptTemplate, format_reward: float = 0.0) -> Verifier:
        """Returns the verifier of a config; see `reward_function` for what it raises."""
        return cls(
            template,
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            format_reward=format_reward,
            function=reward_function(reward),
            concurrency=reward.concurrency,
        )

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that were started."""
        return self._pool.pids

    def verify(
        self, completions: Sequence[str], problems: Sequence[Problem], ended: Sequence[bool] | np.ndarray | None = None
    ) -> Verification:
        """Verifies each completion by its problem.

        Args:
            completions: B texts, without the end-of-sequence token.
            problems: B problems; the same one may stand several times.
            ended: B flags, whether the end-of-sequence token came; a truncated completion earns nothing.  None: it came
                everywhere.

        Raises:
            WorkerError: math-verify is needed and no process for it can be started.
            ConfigError: the user's function raised, or returned something else than a finite number.
        """
        complete = np.ones(len(completions), bool) if ended is None else np.asarray(ended, bool)
        assert len(completions) == len(problems) == len(complete)
        formatted = np.array([self._template.is_formatted(text) for text in completions], bool) & complete
        asked = list(zip(completions, problems, complete, strict=True))
        if self._function is None:
            correct = self._asked_about(
                [self._decide(text, problem) if whole else False for text, problem, whole in asked]
            )
            raw = correct.astype(np.float32)
        else:
            raw = np.array(self._earned(self._function, asked), np.float32)
            correct = raw >= _RIGHT
        rewards = raw + np.float32(self._format_reward) * formatted
        return Verification(correct, formatted, raw, rewards.astype(np.float32))

    def close(self) -> None:
        """Ends the processes; a later call starts new ones."""
        self._pool.close()

    def _earned(self, function: RewardFunction, asked: Sequence[tuple[str, Problem, bool]]) -> list[float]:
        one = lambda row: _earned(function, row[0], row[1]) if row[2] else 0.0  # noqa: E731
        found = []
        for value in map(one, asked) if self._threads is None else self._threads.map(one, asked):
            found.append(value)
            report_progress()
        return found

    def _decide(self, completion: str, problem: Problem) -> bool | tuple[str, str]:
        answer = self._template.final_answer(completion)
        if answer is None:
            return False
        return decide(answer, problem.answer) if problem.rule is None else solves(answer, problem.rule)

    def _asked_about(self, decisions: list[bool | tuple[str, str]]) -> np.ndarray:
        """Asks math-verify about what is undecided, once for each different pair."""
        pairs = list(dict.fromkeys(found for found in decisions if isinstance(found, tuple)))
        equal = dict(zip(pairs, self._pool.equal(pairs), strict=True))
        return np.array([equal[found] if isinstance(found, tuple) else found for found in decisions], bool)


def _earned(function: RewardFunction, completion: str, problem: Problem) -> float:
    asked = f"asked about {completion[:80]!r} as a completion of {problem.question[:80]!r}"
    action = "Mend it there: it returns a number for every completion"
    with named_when_raised(lambda told: ConfigError(f"reward._target_, {asked}, raised {told}\n{action}")):
        found = function(completion, problem)
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(
            f"reward._target_ returned {found!r} for a completion of {problem.question[:80]!r}, but what it earns is a "
            "finite number: return one for every completion"
        )
    return number
