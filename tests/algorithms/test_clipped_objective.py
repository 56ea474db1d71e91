"""The loss of a batch of chunks: what its numbers are per, and published formulas written out."""

from __future__ import annotations

import pytest
import torch

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective
from rlinf_embodied.algorithms.ppo import PPOConfig
from rlinf_embodied.config import Level
from rlinf_embodied.interfaces.policies import Evaluation
from rlinf_embodied.learning.update import POLICY_STATISTICS

C, K = 3, 2  # actions of a chunk, choices of an action


def drawn(size: int, shift: float) -> tuple[TrainingBlock, Evaluation]:
    """Returns chunks sampled from normal choices, every second without its last action, and their score after a shift.

    The policy's KL to the one that sampled is shift^2 / 2 per choice.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(size, C, K, generator=generator)
    valid = torch.ones(size, C, dtype=torch.bool)
    valid[::2, -1] = False
    old = -noise.square() / 2
    advantages = torch.randn(size, 1, generator=generator).expand(size, C)
    block = TrainingBlock({}, {}, old, valid, advantages, valid.float(), None, None, None)
    return block, Evaluation((-(noise - shift).square() / 2).requires_grad_(), torch.full((size, C, K), 0.7))


def statistics(algorithm: PPOConfig, block: TrainingBlock, scored: Evaluation) -> dict[str, float]:
    objective = Objective(algorithm, 1.0, lambda *rows: scored, lambda *rows: block.old_log_probs, joint=False)
    (one,) = objective.policy_passes(block, torch.arange(len(block)))
    sums = one.run()
    return {"total": float(sums.loss)} | dict(zip(POLICY_STATISTICS, sums.statistics.tolist(), strict=True))


@pytest.mark.parametrize("level", list(Level))
def test_a_divergence_is_per_action_at_every_level(level: Level) -> None:
    block, scored = drawn(20_000, 0.1)
    found = statistics(PPOConfig(ratio_level=level), block, scored)
    assert found["actions"] == int(block.valid.sum())
    assert found["approx_kl"] / found["actions"] == pytest.approx(K * 0.1**2 / 2, rel=0.05)


def test_the_entropy_that_is_reported_is_the_one_that_the_bonus_raises() -> None:
    block, scored = drawn(40, 0.0)
    with_bonus, without = (statistics(PPOConfig(entropy_coef=c), block, scored) for c in (0.5, 0.0))
    entropy = without["entropy"] / without["actions"]
    assert entropy == pytest.approx(0.7 * K)  # of an action
    assert with_bonus["total"] - without["total"] == pytest.approx(-0.5 * entropy * without["actions"], rel=1e-5)
