"""The stages of rewards: a completion is scored by its final answer, by a custom function or by a reward model.

Whether an answer is right is a pure function of (completion, problem).  `answers.py` decides most answers by their
texts; the others go to math-verify in a separate process (`verifier_worker.py`), with a limit of processor time rather
than wall-clock time.  A custom function (reward._target_, custom_reward.py) replaces both, and runs in this process
without a limit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import nonzero_variance_groups
from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.device import computing
from rlinf_embodied.interfaces.language import RewardModel
from rlinf_embodied.learning.weights import SharedPolicy, WeightsUser
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.answers import decide
from rlinf_embodied.reasoning.batch import Completions, Rewards, ScoredGroup, dynamic_batches
from rlinf_embodied.reasoning.custom_reward import CustomReward, RewardFunction, reward_function
from rlinf_embodied.reasoning.helper_process import HelperProcess
from rlinf_embodied.reasoning.policy_folder import StageConfig, round_matrices
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext
from rlinf_embodied.telemetry.progress import report_progress

_RIGHT = 1.0  # smallest custom reward of a right answer
_DEFAULT = RewardConfig()


@dataclass(frozen=True, slots=True)
class Verification:
    """Scores of B completions, in their order."""

    correct: np.ndarray  # bool [B]: it ended, and its final answer is right
    formatted: np.ndarray  # bool [B]: it ended, and follows the template
    raw: np.ndarray  # float32 [B]: 1 if correct, or the custom reward (weighted sum); 0 if it did not end
    named: dict[str, np.ndarray]  # float64 [B] each: custom rewards by name ("": a single number)


class Verifier:
    """Scores completions of one prompt template; a context manager that ends math-verify's process.

    The process starts with the first answer that needs it, on this machine.  One caller at a time.
    """

    def __init__(
        self, template: PromptTemplate, config: RewardConfig = _DEFAULT, function: RewardFunction | None = None
    ) -> None:
        """Starts no process; `function` replaces the one that the config names."""
        self.template, self._config = template, config
        function = function or reward_function(config)
        self._custom = None if function is None else CustomReward(function, config)
        # a model's text is evaluated there, so tokens and passwords in the owner's environment are not passed on
        environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONHASHSEED": "0"}
        arguments = ("-m", "rlinf_embodied.reasoning.verifier_worker", str(config.timeout_s))
        self.math_verify = HelperProcess("verifier", arguments, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.math_verify.close()

    def verify(
        self,
        completions: Sequence[str],
        problems: Sequence[Problem],
        ended: Sequence[bool] | np.ndarray | None = None,
        agent_rewards: Sequence[float | None] | None = None,
    ) -> Verification:
        """Verifies each of B completions, given without its end token, by its problem.

        Completions that have not `ended` get no reward (None: all have).  An agent's reward replaces the raw one.

        Raises:
            WorkerError: math-verify is needed, and its process cannot be started.
            ConfigError: the custom function raised, or returned something other than a finite number.
        """
        complete = np.ones(len(completions), bool) if ended is None else np.asarray(ended, bool)
        formatted = np.array([self.template.is_formatted(text) for text in completions], bool) & complete
        rows = list(zip(completions, problems, complete, strict=True))
        named = dict[str, np.ndarray]()
        if self._custom is None:
            correct = self._compare(rows)
            raw = correct.astype(np.float32)
        else:
            for name, values in self._custom.rewards([row[:2] for row in rows if row[2]]).items():
                named[name] = np.zeros(len(rows))
                named[name][complete] = values
            raw = self._custom.weighted(named)
            correct = raw >= _RIGHT
        for row, reward in enumerate(agent_rewards or ()):
            if reward is not None:
                raw[row] = reward
                correct[row] = raw[row] >= _RIGHT
        return Verification(correct, formatted, raw, named)

    def _compare(self, rows: Sequence[tuple[str, Problem, bool]]) -> np.ndarray:
        """Returns which answers are right, bool [B]; math-verify compares each undecided pair once."""
        decisions: list[bool | tuple[str, str]] = []
        for completion, problem, complete in rows:
            answer = self.template.final_answer(completion) if complete else None
            decisions.append(answer is not None and decide(answer, problem.answer))
        pairs = dict.fromkeys(decision for decision in decisions if isinstance(decision, tuple))
        equal = {pair: self.are_equal(*pair) for pair in pairs}
        return np.array([equal[d] if isinstance(d, tuple) else d for d in decisions], bool)

    def are_equal(self, answer: str, reference: str) -> bool:
        """Returns whether math-verify considers two formulas equal.

        They are not if that takes longer than reward.timeout_s, or if three processes were killed meanwhile.

        Raises:
            WorkerError: the process failed, for example because it cannot import math-verify.
        """
        reply = self.math_verify.ask(json.dumps((answer, reference)).encode() + b"\n")
        report_progress()
        return reply == b"1\n"

    def score(
        self, block: int, completions: Completions, max_new_tokens: int, scores: Tensor | None = None
    ) -> tuple[Rewards, list[ScoredGroup]]:
        """Returns a block's rewards and groups; completions were cut off at `max_new_tokens`.

        The `scores` [K x G] of a reward model replace the rewards of right answers, but do not change which are right.
        """
        config, shape, last = self._config, (len(completions.problems), -1), completions.last_rows()
        size = completions.group_size
        problems = [problem for problem in completions.problems for _ in range(size)]
        ended = completions.ended[last].cpu().numpy()
        verified = self.verify(completions.texts, problems, ended, completions.agent_rewards)
        raw = torch.from_numpy(verified.raw) if scores is None else scores
        rewards = raw + config.format_reward * torch.from_numpy(verified.formatted)
        if config.overlong_tokens:
            lengths = (completions.rows.lengths - completions.rows.prompt_lengths)[last].cpu()
            margin = config.overlong_tokens  # soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13
            excess = (lengths - (max_new_tokens - margin)).clamp(min=0, max=margin) / margin
            rewards = rewards - excess * config.overlong_penalty
        rewards, raw = rewards.reshape(shape), raw.reshape(shape)
        zero_variance, groups = (~nonzero_variance_groups(raw)).tolist(), []
        for k, problem in enumerate(completions.problems):
            rows = slice(k * size, (k + 1) * size)
            named = {name: float(values[rows].sum()) for name, values in verified.named.items() if name}
            correct, formatted = tuple(verified.correct[rows].tolist()), int(verified.formatted[rows].sum())
            reward = float(rewards[k].sum())
            groups.append(ScoredGroup(block, k, correct, zero_variance[k], reward, formatted, named, problem.key))
        return Rewards(rewards, raw), groups


class RewardStage(HoldsNoMemory):
    """Scores completions, and subtracts the penalty of long ones."""

    def __init__(self, stage_config: StageConfig) -> None:
        self._config = stage_config.config

    def setup(self, context: StageContext) -> None:
        self._verifier = Verifier(PromptTemplate.of(self._config.data), self._config.reward)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Rewards of each block; reports its groups."""
        max_new_tokens, outputs, groups = self._config.generation.max_new_tokens, {}, list[ScoredGroup]()
        for block, (completions, *scores) in inputs.items():  # scores of the reward model, if there is one
            arguments = cast(Completions, completions), max_new_tokens, *cast("list[Tensor]", scores)
            outputs[block], scored_groups = self._verifier.score(block, *arguments)
            groups += scored_groups
        return Output(outputs, groups)


class RewardModelStage(WeightsUser[RewardModel]):
    """Scores, by a frozen model, the last row of each sample, which includes the tool's answers; for `RewardStage`."""

    _user = "reward model"

    def __init__(self, stage_config: StageConfig) -> None:
        self._config, self._folder = stage_config.config, Path(stage_config.folder)

    def setup(self, context: StageContext) -> None:
        model_class = cast(type[RewardModel], load_target(self._config.reward.model_target))
        self._shared = SharedPolicy(model_class.load(self._folder), device=context.device)
        round_matrices(self._shared.policy.module, self._config.algorithm.precision)
        self._shared.enter(self._user)
        self._device = context.device

    @torch.no_grad()
    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the scores of each block, float32 [K x G]."""
        with computing(self._config.algorithm.precision, self._device):
            return Output({block: self._scores(cast(Completions, payload)) for block, (payload,) in inputs.items()})

    def _scores(self, completions: Completions) -> Tensor:
        model, budget = self._shared.policy, self._config.algorithm.tokens_per_microbatch
        rows = completions.rows.select(completions.last_rows())
        scores, batches = torch.zeros(len(rows)), [[row] for row in range(len(rows))]
        if model.pad_id is not None:  # otherwise transformers cannot locate the end of shorter rows
            batches = dynamic_batches(rows.lengths.tolist(), budget)
        for part in batches:
            scores[part] = model.scores(rows.select(part).to(self._device)).cpu()
            report_progress()
        return scores
