"""What a high-level policy learns from is what a walk over env steps, one by one, says it is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, TwoLevelColumns
from rlinf_embodied.algorithms.ppo import PPOConfig, ppo_block
from rlinf_embodied.config import Critic
from rlinf_embodied.embodied.hierarchy import decision_columns
from rlinf_embodied.interfaces.envs import Observation
from tests.observations import observed


class SeesValues:
    """A policy that is shown what its critic says."""

    def encode(self, observation: Observation) -> dict[str, Tensor]:
        return {"value": observation.proprio}

    def value(self, features: dict[str, Tensor], privileged: Tensor | None) -> Tensor:
        return features["value"][:, :1]


@dataclass
class Rollout:
    """One row of chunk-steps, as its env columns and as plain numbers."""

    env: EnvColumns
    every: int
    gamma: float
    final: dict[int, float]  # value of the final observation by chunk-step
    values: list[float] = field(default_factory=list)  # before each decision


def shown(*values: float) -> Observation:
    return observed(torch.tensor([[value] for value in values]), ("",) * len(values))


def drawn(seed: int) -> Rollout:
    """Returns a row whose episodes end anywhere, and begin anew or leave it frozen."""
    draw = random.Random(seed)
    chunk, every, begins_anew = draw.randint(1, 3), draw.randint(1, 4), draw.random() < 0.6
    terminated, truncated, valid, final = [], [], [], {}
    for step in range(draw.randint(every, 9)):
        end = draw.randrange(chunk) if draw.random() < 0.3 else None
        by_time = draw.random() < 0.5
        terminated.append([c == end and not by_time for c in range(chunk)])
        truncated.append([c == end and by_time for c in range(chunk)])
        valid.append([end is None or c <= end for c in range(chunk)])
        if end is not None:
            final[step] = draw.gauss(0, 1)
            if not begins_anew:
                break
    steps = len(valid)
    flags = [torch.tensor(column).reshape(steps, 1, chunk) for column in (terminated, truncated, valid)]
    rewards = torch.tensor([draw.gauss(0, 1) for _ in range(steps * chunk)]).reshape(steps, 1, chunk)
    index = torch.tensor([[step, 0] for step in final], dtype=torch.long).reshape(-1, 2)
    seen = shown(*final.values()) if final else None
    env = EnvColumns(rewards, *flags, None, shown(draw.gauss(0, 1)), index, seen, torch.zeros(1).bool())
    values = [draw.gauss(0, 1) for _ in range(-(-steps // every))]
    return Rollout(env, every, draw.choice([0.5, 0.9, 1.0]), final, values)


def walked(row: Rollout, lam: float, bootstraps: bool) -> list[float]:
    """Returns the advantage of each decision, from the last one to the first."""
    env, found = row.env, []
    advantage, following = 0.0, float(env.last.proprio[0, 0])
    for number in range(len(row.values) - 1, -1, -1):
        reward, steps, ended, after = 0.0, 0, False, following
        for h in range(number * row.every, min((number + 1) * row.every, len(env.rewards))):
            for c in range(env.rewards.shape[2]):
                if ended or not env.valid[h, 0, c]:
                    continue
                reward, steps = reward + row.gamma**steps * float(env.rewards[h, 0, c]), steps + 1
                if env.terminated[h, 0, c] or env.truncated[h, 0, c]:
                    ended, after = True, row.final[h] if env.truncated[h, 0, c] and bootstraps else 0.0
        value = row.values[number]
        goes_on = 0.0 if ended else row.gamma**steps * lam * advantage
        advantage, following = reward + row.gamma**steps * after - value + goes_on, value
        found.append(advantage)
    return found[::-1]


@pytest.mark.parametrize("bootstraps", [True, False])
def test_decisions_have_the_advantages_of_a_semi_markov_process(bootstraps: bool) -> None:
    for seed in range(120):
        row, lam = drawn(seed), [0.0, 0.6, 1.0][seed % 3]
        values = torch.tensor(row.values).reshape(-1, 1, 1)
        columns = PolicyColumns({}, {}, torch.zeros(*values.shape, 1), 0, values=values)
        view = decision_columns(row.every, row.gamma, TwoLevelColumns(None, columns, torch.zeros(0)), row.env)
        algorithm = replace(PPOConfig(gamma=row.gamma, gae_lambda=lam), bootstrap_at_timeout=bootstraps)
        block = ppo_block(SeesValues(), [view], algorithm, Critic.observation)  # pyright: ignore[reportArgumentType]
        expected = walked(row, lam, bootstraps)
        assert block.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-5), seed
        assert block.returns is not None
        returns = [advantage + value for advantage, value in zip(expected, row.values, strict=True)]
        assert block.returns.flatten().tolist() == pytest.approx(returns, abs=1e-5), seed
