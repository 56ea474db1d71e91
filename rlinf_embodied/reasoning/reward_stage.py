"""Rewards as a stage: which completions are right, or what a function of the user's says they earn.

What is right is a pure function of (completion, problem): `answers.py` decides by the texts alone wherever it can, and
bounds what is left for math-verify, which runs under a limit of processor time (not of the clock) in
`verifier.py`.  A function of the user's (reward._target_, custom_reward.py) replaces all that, and runs in the
caller's process, without a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import nonzero_variance_groups
from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.reasoning.answers import decide
from rlinf_embodied.reasoning.batch import Completions, Rewards, ScoredGroup
from rlinf_embodied.reasoning.custom_reward import CustomReward, RewardFunction, reward_function
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.verifier import MathVerifier
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext

_RIGHT = 1.0  # what a function gives a right answer, at least
_RIGHT_BY_TEXT = RewardConfig()


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found about B completions, in their order."""

    correct: np.ndarray  # bool [B]: the final answer is right and the completion came to its end
    formatted: np.ndarray  # bool [B]: it came to its end and follows the template
    raw: np.ndarray  # float32 [B]: 1 where correct, or the user's function's (weighted sum); 0 where it did not end
    rewards: np.ndarray  # float32 [B]: raw + format_reward * formatted
    named: dict[str, np.ndarray]  # float64 [B] each: what the user's function gave, by name ("": it gives no names)


class Verifier:
    """Verifies completions of one prompt template; a context manager.

    Its process starts when a first answer needs it, on the machine where it is called.  One caller at a time.
    """

    def __init__(
        self, template: PromptTemplate, config: RewardConfig = _RIGHT_BY_TEXT, function: RewardFunction | None = None
    ) -> None:
        """Starts nothing yet; `function` takes the place of the one that the config names."""
        self.template, self._format_reward = template, config.format_reward
        function = function or reward_function(config)
        self._custom = None if function is None else CustomReward(function, config)
        self._math = MathVerifier(config.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._math.close()

    def verify(
        self,
        completions: Sequence[str],
        problems: Sequence[Problem],
        ended: Sequence[bool] | np.ndarray | None = None,
        earned: Sequence[float | None] | None = None,
    ) -> Verification:
        """Verifies each of B completions, without its end-of-sequence token, by its problem.

        Those where this token did not come (None: it came everywhere) earn nothing; those that have `earned` something
        already earn that.

        Raises:
            WorkerError: math-verify is needed and no process for it can be started.
            ConfigError: the user's function raised, or returned something else than a finite number.
        """
        complete = np.ones(len(completions), bool) if ended is None else np.asarray(ended, bool)
        formatted = np.array([self.template.is_formatted(text) for text in completions], bool) & complete
        asked = list(zip(completions, problems, complete, strict=True))
        named = dict[str, np.ndarray]()
        if self._custom is None:
            correct = self._compared(asked)
            raw = correct.astype(np.float32)
        else:
            for name, values in self._custom.earned([row[:2] for row in asked if row[2]]).items():
                named[name] = np.zeros(len(asked))
                named[name][complete] = values
            raw = self._custom.weighted(named)
            correct = raw >= _RIGHT
        if earned is not None and (numbers := [n for n, value in enumerate(earned) if value is not None]):
            raw[numbers] = [value for value in earned if value is not None]
            correct[numbers] = raw[numbers] >= _RIGHT
        rewards = raw + np.float32(self._format_reward) * formatted
        return Verification(correct, formatted, raw, rewards.astype(np.float32), named)

    def _compared(self, asked: Sequence[tuple[str, Problem, bool]]) -> np.ndarray:
        """Returns which answers are right; math-verify is asked once about each undecided pair."""
        decisions: list[bool | tuple[str, str]] = []
        for completion, problem, whole in asked:
            answer = self.template.final_answer(completion) if whole else None
            decisions.append(answer is not None and decide(answer, problem.answer))
        pairs = list(dict.fromkeys(found for found in decisions if isinstance(found, tuple)))
        equal = dict(zip(pairs, self._math.equal(pairs), strict=True))
        return np.array([equal[found] if isinstance(found, tuple) else found for found in decisions], bool)


class RewardStage(HoldsNoMemory):
    """Scores completions, and takes from the reward what long ones cost."""

    def __init__(self, made: StageConfig) -> None:
        self._config = made.config

    def setup(self, context: StageContext) -> None:
        self._verifier = Verifier(PromptTemplate.of(self._config.data), self._config.reward)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Rewards of each block; reports its groups."""
        longest, made, groups = self._config.generation.max_new_tokens, {}, list[ScoredGroup]()
        for block, (completions, *scores) in inputs.items():  # scores: of the reward model, if there is one
            given = cast(Completions, completions), *cast("list[Tensor]", scores)
            made[block], found = scored(self._verifier, self._config.reward, longest, block, *given)
            groups += found
        return Output(made, groups)


def scored(
    verifier: Verifier,
    reward: RewardConfig,
    longest: int,
    block: int,
    completions: Completions,
    scores: Tensor | None = None,
) -> tuple[Rewards, list[ScoredGroup]]:
    """Returns a block's rewards and groups; `longest` are the tokens at which a completion was cut off.

    The `scores` [K x G] of a reward model take the place of what right answers earn; which are right stays the same.
    """
    shape, last = (len(completions.problems), -1), completions.last_rows()
    problems = [problem for problem in completions.problems for _ in range(completions.group_size)]
    ended = completions.ended[last].cpu().numpy()
    verified = verifier.verify(completions.texts, problems, ended, completions.earned)
    rewards, raw = torch.from_numpy(verified.rewards), torch.from_numpy(verified.raw).reshape(shape)
    if scores is not None:
        rewards, raw = scores + reward.format_reward * torch.from_numpy(verified.formatted), scores.reshape(shape)
    if reward.overlong_tokens:
        lengths = (completions.rows.lengths - completions.rows.prompt_lengths)[last].cpu()
        margin = reward.overlong_tokens  # soft punishment of DAPO, arXiv 2503.14476, eq. 13: linear in them
        rewards = rewards - ((lengths - (longest - margin)).clamp(min=0, max=margin) / margin) * reward.overlong_penalty
    rewards, correct = rewards.reshape(shape), verified.correct.reshape(shape).tolist()
    alike, sums = (~nonzero_variance_groups(raw)).tolist(), [float(row.sum()) for row in rewards]
    formatted = verified.formatted.reshape(shape).sum(1).tolist()
    keys = [problem.key for problem in completions.problems]
    named = [
        {name: float(values.reshape(shape)[k].sum()) for name, values in verified.named.items() if name}
        for k in range(shape[0])
    ]
    rows = zip(map(tuple, correct), alike, sums, formatted, named, keys, strict=True)
    return Rewards(rewards, raw), [ScoredGroup(block, k, *row) for k, row in enumerate(rows)]
