"""Rewards as a stage: which completions are right, and what long ones cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from rlinf_embodied.algorithms.advantages import nonzero_variance_groups, overlong_penalty
from rlinf_embodied.config import RewardConfig, SamplesConfig
from rlinf_embodied.data.prompt_templates import prompt_template
from rlinf_embodied.reasoning.batch import Completions, RewardReport, Rewards, Sample
from rlinf_embodied.reasoning.verifier import Verification, Verifier
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


@dataclass(frozen=True, slots=True)
class RewardStageConfig:
    """What the stage needs to know."""

    reward: RewardConfig
    prompt_template: str
    max_new_tokens: int
    samples: SamplesConfig


class RewardStage:
    """Scores completions."""

    def __init__(self, config: RewardStageConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Makes the verifier; its processes start when an answer needs them."""
        reward, template = self._config.reward, prompt_template(self._config.prompt_template)
        self._verifier = Verifier.of(reward, template, reward.format_reward)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Rewards of each block."""
        made: dict[int, Rewards] = {}
        correct: dict[int, tuple[tuple[bool, ...], ...]] = {}
        zero_variance: dict[int, tuple[bool, ...]] = {}
        sums: dict[int, float] = {}
        formatted: dict[int, int] = {}
        shown: list[tuple[tuple[int, int], Sample]] = []
        for block, (completions,) in cast("Mapping[int, list[Completions]]", inputs).items():
            made[block], verified = self._rewards(completions)
            shape = made[block].raw.shape
            correct[block] = tuple(tuple(row) for row in verified.correct.reshape(shape).tolist())
            zero_variance[block] = tuple((~nonzero_variance_groups(made[block].raw)).tolist())
            formatted[block] = int(verified.formatted.sum())
            sums[block] = float(made[block].rewards.sum())
            if self._shows(step_context):
                shown += self._shown(block, completions, made[block], correct[block])
        return Output(made, RewardReport(correct, zero_variance, sums, formatted, tuple(shown)))

    def _shows(self, step_context: StepContext) -> bool:
        every = self._config.samples.every
        return every > 0 and step_context.iteration % every == 0 and step_context.round == 0

    def _shown(
        self, block: int, completions: Completions, rewards: Rewards, correct: Sequence[Sequence[bool]]
    ) -> list[tuple[tuple[int, int], Sample]]:
        """Returns the completions of those prompts of a block that are among the first of all blocks."""
        prompts, size = rewards.rewards.shape
        number = min(prompts, max(0, self._config.samples.num_prompts - block * prompts)) * size
        earned, right = rewards.rewards.flatten().tolist(), [value for row in correct for value in row]
        problems = [completions.problems[row // size] for row in range(number)]
        return [
            ((block, row), Sample(p.question, p.answer, completions.texts[row], earned[row], float(right[row])))
            for row, p in enumerate(problems)
        ]

    def _rewards(self, completions: Completions) -> tuple[Rewards, Verification]:
        size = len(completions.groups[0].lengths)
        problems = [problem for problem in completions.problems for _ in range(size)]
        ended = np.concatenate([group.ended.cpu().numpy() for group in completions.groups])
        verified = self._verifier.verify(completions.texts, problems, ended)
        rewards = torch.from_numpy(verified.rewards)
        if self._config.reward.overlong_tokens:
            lengths = torch.cat([group.lengths.cpu() for group in completions.groups])
            reward, longest = self._config.reward, self._config.max_new_tokens
            rewards = rewards - overlong_penalty(lengths, longest, reward.overlong_tokens, reward.overlong_penalty)
        shape = (len(completions.groups), size)
        return Rewards(rewards.reshape(shape), torch.from_numpy(verified.raw).reshape(shape)), verified

    def offload(self, step_context: StepContext) -> None:
        """Leaves the device's memory: it holds none."""

    def onload(self, step_context: StepContext) -> None:
        """Comes back."""
