"""Rewards as a stage: which completions are right, or what a function of the user's says they earn.

What is right is a pure function of (completion, problem): `answers.py` decides by the texts alone wherever it can, and
bounds what is left for math-verify, which runs under a limit of processor time (not of the clock) in
`verifier.py`.  A function of the user's (reward._target_) replaces all that, and runs in the caller's process,
without a limit; several calls of it at once in threads, if it waits for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch

from rlinf_embodied.algorithms.advantages import nonzero_variance_groups
from rlinf_embodied.config import RewardConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, named_when_raised
from rlinf_embodied.reasoning.answers import decide
from rlinf_embodied.reasoning.batch import Completions, Rewards, ScoredGroup
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.verifier import MathVerifier
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext
from rlinf_embodied.telemetry.progress import report_progress

RewardFunction = Callable[[str, Problem], float]  # (completion without its ending token, problem) -> what it earns
_RIGHT = 1.0  # what a function gives a right answer, at least
_RIGHT_BY_TEXT = RewardConfig()


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

    Its process starts when a first answer needs it, on the machine where it is called.  One caller at a time.
    """

    def __init__(
        self, template: PromptTemplate, config: RewardConfig = _RIGHT_BY_TEXT, function: RewardFunction | None = None
    ) -> None:
        """Starts nothing yet; `function` takes the place of the one that the config names."""
        self.template, self._format_reward = template, config.format_reward
        self._function = function or reward_function(config)
        self._threads = ThreadPoolExecutor(config.concurrency, "reward") if config.concurrency > 1 else None
        self._math = MathVerifier(config.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._math.close()

    def verify(
        self, completions: Sequence[str], problems: Sequence[Problem], ended: Sequence[bool] | np.ndarray | None = None
    ) -> Verification:
        """Verifies each of B completions, without its end-of-sequence token, by its problem.

        Those where this token did not come (None: it came everywhere) earn nothing.

        Raises:
            WorkerError: math-verify is needed and no process for it can be started.
            ConfigError: the user's function raised, or returned something else than a finite number.
        """
        complete = np.ones(len(completions), bool) if ended is None else np.asarray(ended, bool)
        formatted = np.array([self.template.is_formatted(text) for text in completions], bool) & complete
        asked = list(zip(completions, problems, complete, strict=True))
        if self._function is None:
            correct = self._compared(asked)
            raw = correct.astype(np.float32)
        else:
            raw = np.array(self._earned(self._function, asked), np.float32)
            correct = raw >= _RIGHT
        rewards = raw + np.float32(self._format_reward) * formatted
        return Verification(correct, formatted, raw, rewards.astype(np.float32))

    def _compared(self, asked: Sequence[tuple[str, Problem, bool]]) -> np.ndarray:
        """Returns which answers are right; math-verify is asked once about each undecided pair."""
        decisions: list[bool | tuple[str, str]] = []
        for completion, problem, whole in asked:
            answer = self.template.final_answer(completion) if whole else None
            decisions.append(answer is not None and decide(answer, problem.answer))
        pairs = list(dict.fromkeys(found for found in decisions if isinstance(found, tuple)))
        equal = dict(zip(pairs, self._math.equal(pairs), strict=True))
        return np.array([equal[found] if isinstance(found, tuple) else found for found in decisions], bool)

    def _earned(self, function: RewardFunction, asked: Sequence[tuple[str, Problem, bool]]) -> list[float]:
        one = lambda row: _earned(function, row[0], row[1]) if row[2] else 0.0  # noqa: E731
        found = []
        for value in map(one, asked) if self._threads is None else self._threads.map(one, asked):
            found.append(value)
            report_progress()
        return found


def _earned(function: RewardFunction, completion: str, problem: Problem) -> float:
    about = f"{completion[:80]!r} as a completion of {problem.question[:80]!r}"
    refused = f"reward._target_, asked about {about}, raised"
    with named_when_raised(lambda raised: ConfigError(f"{refused} {raised}\nCorrect it there")):
        found = function(completion, problem)
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    rule = f"it returned that for {about}, which earns a finite number"
    require(math.isfinite(number), "reward._target_", found, rule, "return one for every completion")
    return number


class RewardStage(HoldsNoMemory):
    """Scores completions, and takes from the reward what long ones cost."""

    def __init__(self, made: StageConfig) -> None:
        self._config = made.config

    def setup(self, context: StageContext) -> None:
        self._verifier = Verifier(PromptTemplate.of(self._config.data), self._config.reward)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Rewards of each block; reports its groups."""
        longest, made, groups = self._config.generation.max_new_tokens, {}, list[ScoredGroup]()
        for block, (completions,) in cast("Mapping[int, list[Completions]]", inputs).items():
            made[block], found = scored(self._verifier, self._config.reward, longest, block, completions)
            groups += found
        return Output(made, groups)


def scored(
    verifier: Verifier, reward: RewardConfig, longest: int, block: int, completions: Completions
) -> tuple[Rewards, list[ScoredGroup]]:
    """Returns a block's rewards and groups; `longest` are the tokens at which a completion was cut off."""
    shape = (len(completions.groups), -1)
    size = len(completions.texts) // shape[0]
    problems = [problem for problem in completions.problems for _ in range(size)]
    ended = torch.cat([group.ended for group in completions.groups]).cpu().numpy()
    verified = verifier.verify(completions.texts, problems, ended)
    rewards, raw = torch.from_numpy(verified.rewards), torch.from_numpy(verified.raw).reshape(shape)
    if reward.overlong_tokens:
        lengths = torch.cat([group.lengths for group in completions.groups]).cpu()
        margin = reward.overlong_tokens  # soft punishment of DAPO, arXiv 2503.14476, eq. 13: linear in them
        rewards = rewards - ((lengths - (longest - margin)).clamp(min=0, max=margin) / margin) * reward.overlong_penalty
    rewards, correct = rewards.reshape(shape), verified.correct.reshape(shape).tolist()
    alike, sums = (~nonzero_variance_groups(raw)).tolist(), [float(row.sum()) for row in rewards]
    formatted = verified.formatted.reshape(shape).sum(1).tolist()
    keys = [problem.key for problem in completions.problems]
    rows = zip(map(tuple, correct), alike, sums, formatted, keys, strict=True)
    return Rewards(rewards, raw), [ScoredGroup(block, k, *row) for k, row in enumerate(rows)]
