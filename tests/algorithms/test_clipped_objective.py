"""The loss of a batch of chunks: what its numbers are per, and published formulas written out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective, policy_statistics
from rlinf_embodied.algorithms.on_policy import POLICY
from rlinf_embodied.algorithms.policy_losses import CISPO, GSPO, Clipped
from rlinf_embodied.algorithms.ppo import PPO, PPOConfig
from rlinf_embodied.config import Level
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Evaluation
from rlinf_embodied.learning import update

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
    (one,) = objective.policy_passes({0: block}, {0: torch.arange(len(block))})
    sums = one.run()
    names = policy_statistics(algorithm)
    return {"total": float(sums.loss.detach())} | dict(zip(names, sums.statistics.tolist(), strict=True))


@pytest.mark.parametrize("level", list(Level))
def test_a_divergence_is_per_action_at_every_level(level: Level) -> None:
    block, scored = drawn(20_000, 0.1)
    found = statistics(PPOConfig(ratio_level=level), block, scored)
    assert found["actions"] == int(block.valid.sum())
    assert found["approx_kl"] / found["actions"] == pytest.approx(K * 0.1**2 / 2, rel=0.05)


def test_epochs_end_at_a_divergence_per_action(monkeypatch) -> None:
    monkeypatch.setattr(update, "fit", lambda learner, batches, passes, stop: stop)
    ppo = PPO.__new__(PPO)
    ppo.algorithm, ppo.learners, ppo._blocks, ppo._iteration = PPOConfig(target_kl=0.1), {POLICY: None}, {}, 0
    ppo.training, ppo.cloning = SimpleNamespace(seed=0), None  # pyright: ignore
    stop = ppo._policy_steps()
    step = lambda kl: SimpleNamespace(sums={"approx_kl": kl, "actions": 10.0, "ratios": 70.0})  # noqa: E731
    assert (stop(step(0.9)), stop(step(1.1))) == (False, True)


def test_the_unit_of_value_clip_huber_delta_and_the_loss_is_the_scale_of_returns() -> None:
    """So the weight of the critic's loss beside the policy's does not depend on the scale of rewards."""
    block, scored = drawn(12, 0.3)
    values, returns = 3 * scored.log_probs.sum(-1).detach(), 5 * block.advantages
    block = replace(block, values=torch.zeros_like(values), returns=returns)
    found = []
    for unit, config in (
        (3.0, PPOConfig(value_clip=0.2, huber_delta=1.0)),
        (1.0, PPOConfig(value_clip=0.6, huber_delta=3.0)),
    ):
        scale = lambda unit=unit: torch.tensor([unit])  # noqa: E731
        objective = Objective(config, 1.0, lambda *rows: scored, lambda *rows: values, joint=False, return_scale=scale)
        (one,) = objective.value_passes({0: block}, {0: torch.arange(len(block))})
        found.append(float(one.run().loss))
    assert 9 * found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_entropy_that_is_reported_is_the_one_that_the_bonus_raises() -> None:
    block, scored = drawn(40, 0.0)
    with_bonus, without = (statistics(PPOConfig(entropy_coef=c), block, scored) for c in (0.5, 0.0))
    entropy = without["entropy"] / without["actions"]
    assert entropy == pytest.approx(0.7 * K)  # of an action
    assert with_bonus["total"] - without["total"] == pytest.approx(-0.5 * entropy * without["actions"], rel=1e-5)


# ----------------------------------------------------------------------------------------------------- other objectives
def test_cispo_weighs_log_probs_by_a_clipped_ratio_without_cutting_any_gradient_off() -> None:
    block, scored = drawn(12, 0.8)
    config = PPOConfig(loss=CISPO(), clip_low=0.1, clip_high=0.2)
    now = scored.log_probs.sum(-1)
    ratio = (now - block.old_log_probs.sum(-1)).detach().exp().clamp(0.9, 1.2)
    expected = -(ratio * block.advantages * now)[block.valid].sum()
    assert statistics(config, block, scored)["total"] == pytest.approx(float(expected), rel=1e-5)


def test_the_ratio_of_gspo_is_the_geometric_mean_over_a_chunks_choices() -> None:
    block, scored = drawn(12, 0.3)
    config = PPOConfig(loss=GSPO(), ratio_level=Level.chunk, clip_low=0.02, clip_high=0.04)
    expected = 0.0
    for row in range(len(block)):
        kept = block.valid[row]
        ratio = float((scored.log_probs - block.old_log_probs)[row][kept].mean().exp())
        advantage = float(block.advantages[row, 0])
        expected -= int(kept.sum()) * min(ratio * advantage, min(max(ratio, 0.98), 1.04) * advantage)
    found = statistics(config, block, scored)
    assert found["total"] == pytest.approx(expected, rel=1e-5)
    plain = statistics(replace(config, loss=Clipped()), block, scored)
    assert found["approx_kl"] == plain["approx_kl"]  # that of whole chunks
    with pytest.raises(ConfigError, match=r"algorithm.ratio_level is 'action', but GSPO has one ratio per chunk"):
        PPOConfig(loss=GSPO())


@pytest.mark.parametrize("level", list(Level))
def test_the_kl_to_the_reference_is_added_at_the_level_of_the_ratio(level: Level) -> None:
    block, scored = drawn(12, 0.3)
    reference = block.old_log_probs - 0.1
    block = replace(block, reference_log_probs=reference)
    without = statistics(PPOConfig(ratio_level=level, kl_coef=0.0), replace(block, reference_log_probs=None), scored)
    found = statistics(PPOConfig(ratio_level=level, kl_coef=0.5), block, scored)
    apart = torch.where(block.valid[..., None], reference - scored.log_probs, 0.0).detach()
    apart = {Level.token: apart, Level.action: apart.sum(-1), Level.chunk: apart.sum((1, 2))}[level]
    k3 = apart.exp() - 1 - apart
    weights = {Level.token: 1 / K, Level.action: 1.0, Level.chunk: block.valid.sum(-1)}[level]
    expected = float((k3 * weights).sum())
    assert found["reference_kl"] == pytest.approx(expected, rel=1e-5)
    assert found["total"] - without["total"] == pytest.approx(0.5 * expected, rel=1e-4)
