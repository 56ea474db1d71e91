"""A critic's advantages by hand, its update, and where an episode of tokens ends."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from math_runs import PPO, completions, tiny_math
from runs import clone

from policies.value_lm import ValueLM
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.batch import Completions, Rewards
from rlinf_embodied.reasoning.critic_stage import CriticStage
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.host import StepContext, solo_context

# one completion each: tokens, whether it came to its end, what it earned
EPISODES = [([5, 6, 1], True, 1.0), ([7], False, 0.0), ([8, 9, 10, 11], False, 0.5)]
VALUE = 0.25


@pytest.fixture(scope="module")
def folder() -> str:
    return str(clone(tiny_math()))


def critic(folder: str, *overrides: str) -> CriticStage:
    config = tiny_math(*PPO, *overrides)
    stage = CriticStage(StageConfig(config, folder))
    stage.setup(solo_context([0, 1]))
    return stage


def net_of(stage: CriticStage) -> ValueLM:
    found = stage._critic
    assert isinstance(found, ValueLM)
    return found


def constant(stage: CriticStage, value: float) -> None:
    """Makes the critic say the same of every token: its head has weights of 0."""
    torch.nn.init.constant_(net_of(stage).module.head.bias, value)


def block(numbers: list[int]) -> list[object]:
    tokens, ended, rewards = zip(*(EPISODES[i] for i in numbers), strict=True)
    problems = [Problem(i, "?", "1", None, "text", "own") for i in numbers]
    found = torch.tensor(rewards)[:, None]
    return [completions(problems, [(4, 2 + i) for i in numbers], tokens, ended=ended), Rewards(found, found > 0)]


BLOCKS = {0: block([0, 1]), 1: block([2])}


def advantages_of(output) -> list[list[float]]:
    found = []
    for number, episodes in ((0, (0, 1)), (1, (2,))):
        table = output.blocks[number]
        assert isinstance(table, torch.Tensor)
        found += [row[: len(EPISODES[i][0])].tolist() for row, i in zip(table, episodes, strict=True)]
        for row, i in zip(table, episodes, strict=True):
            assert not row[len(EPISODES[i][0]) :].any()
    return found


def test_advantages_are_those_worked_out_by_hand(folder):
    gamma, lam = 0.9, 0.8
    stage = critic(folder, f"algorithm.gamma={gamma}", f"algorithm.gae_lambda={lam}")
    constant(stage, VALUE)
    output = stage.run(StepContext(0), BLOCKS)
    raw = []
    for tokens, _, reward in EPISODES:  # cut off or not: nothing follows the last token
        row, following = [], 0.0
        for place in reversed(range(len(tokens))):
            last = place == len(tokens) - 1
            delta = (reward if last else gamma * VALUE) - VALUE
            following = delta + (0.0 if last else gamma * lam * following)
            row.append(following)
        raw.append(row[::-1])
    assert raw[0] == pytest.approx([-0.025 + 0.72 * (-0.025 + 0.72 * 0.75), -0.025 + 0.72 * 0.75, 0.75])
    every = torch.tensor([a for row in raw for a in row], dtype=torch.float64)
    mean, std = float(every.mean()), float(every.std(correction=0))
    for found, expected in zip(advantages_of(output), raw, strict=True):
        assert found == pytest.approx([(a - mean) / std for a in expected], abs=1e-5)


def test_episodes_of_several_rows_are_refused_by_name(folder):
    made, rewards = block([0, 1])
    assert isinstance(made, Completions)
    episode = replace(made, problems=made.problems[:1], texts=made.texts[:1], samples=(0, 0), agent_rewards=(None,))
    stage = critic(folder, "tool._target_=experiments.examples.calculator.calculate")
    with pytest.raises(ConfigError, match=r"tool\._target_ is '.*', but the chat template .*use algorithm=grpo"):
        stage.run(StepContext(0), {0: [episode, rewards]})


def test_the_update_brings_values_closer_to_returns_and_reports_the_loss_before_it(folder):
    stage = critic(folder, "algorithm.value_lr=1e-2")
    constant(stage, VALUE)
    reports = [cast("dict[str, float]", stage.run(StepContext(number), BLOCKS).report) for number in range(30)]
    losses = [report["losses/value_loss"] for report in reports]
    # gamma is 1 and lambda 0.95: with equal values, returns are V + 0.95^k (R - V), k tokens before the last
    returns = [VALUE + 0.95**k * (reward - VALUE) for tokens, _, reward in EPISODES for k in range(len(tokens))]
    assert losses[0] == pytest.approx(sum(0.5 * (r - VALUE) ** 2 for r in returns) / len(returns), rel=1e-5)
    assert losses[-1] < 0.05 * losses[0]
    assert reports[-1]["losses/explained_variance"] > 0.9


def test_it_starts_from_the_policy_but_shares_nothing_with_it(folder):
    stage = critic(folder)
    again = critic(folder)
    before = {n: t.clone() for n, t in net_of(again).module.state_dict().items()}
    stage.run(StepContext(0), BLOCKS)
    assert all(torch.equal(t, before[n]) for n, t in net_of(again).module.state_dict().items())
    changed = {n for n, t in net_of(stage).module.state_dict().items() if not torch.equal(t, before[n])}
    assert {"head.weight", "head.bias"} <= changed
