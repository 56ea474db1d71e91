"""A rollout whose recorded log-probs are not training's: what is measured of it, and what a cap makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import GRPO, clone, digest, executor_for, iterate, tiny, trees

from policies.tiny_vla import TinyVLA
from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective
from rlinf_embodied.algorithms.ppo import PPOConfig
from rlinf_embodied.config import Level, TrainConfig
from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.interfaces.policies import Evaluation
from rlinf_embodied.runtime.session import SerialSession

ONE_STEP = ["algorithm.epochs=1", "algorithm.num_minibatches=1", "algorithm.critic_warmup_iterations=0"]
CAPPED = "algorithm.tis_cap=2"


def records_too_much(monkeypatch: pytest.MonkeyPatch, surplus: float) -> None:
    """From now on rollouts record log-probs that are higher by `surplus` than those they sampled with."""
    act = TinyVLA.act

    def recorded(self, *arguments):
        found = act(self, *arguments)
        return replace(found, log_probs=found.log_probs + surplus)

    monkeypatch.setattr(TinyVLA, "act", recorded)


def first_iteration(config: TrainConfig, start: Path) -> dict[str, float]:
    executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), start)
    return iterate(config, executor, 1)[0]


@pytest.mark.parametrize("variant", [[], GRPO], ids=["ppo", "grpo"])
def test_a_cap_changes_no_bit_where_rollout_and_training_agree(variant: list[str]) -> None:
    found = []
    for cap in ("null", "1.0"):
        config = tiny(*variant, f"algorithm.tis_cap={cap}")
        executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
        metrics = iterate(config, executor, 2)
        found.append(digest(executor))
        for row in metrics:
            assert row["losses/initial_log_ratio"] == 0
    assert found[0] == found[1]


@pytest.mark.parametrize(("surplus", "weight"), [(0.1, math.exp(-0.2)), (-0.5, 2.0)])
def test_the_gradient_is_that_of_an_exact_rollout_times_the_truncated_ratio(
    monkeypatch, surplus: float, weight: float
) -> None:
    config = tiny(*ONE_STEP, CAPPED, "algorithm.ratio_tolerance=1", "algorithm.rows_per_microbatch=5")
    start = clone(config)
    exact = first_iteration(config, start)
    records_too_much(monkeypatch, surplus)
    found = first_iteration(config, start)
    assert found["losses/grad_norm"] == pytest.approx(weight * exact["losses/grad_norm"], rel=1e-3)
    assert found["losses/clipfrac"] == found["losses/approx_kl"] == 0  # the ratio's denominator is training's own
    assert found["losses/initial_log_ratio"] == pytest.approx(abs(surplus), rel=1e-4)


def test_without_a_cap_the_first_minibatch_is_compared_and_the_ratio_is_to_the_rollout(monkeypatch) -> None:
    config = tiny(*ONE_STEP, "algorithm.ratio_tolerance=1")
    start = clone(config)
    records_too_much(monkeypatch, 0.2)
    found = first_iteration(config, start)
    assert found["losses/initial_log_ratio"] == pytest.approx(0.2, rel=1e-4)
    assert found["losses/clipfrac"] == 1  # e^-0.4 of each action lies below 1 - clip_low


@pytest.mark.parametrize("cap", [[], [CAPPED]], ids=["off", "capped"])
def test_more_than_rounding_ends_the_run(monkeypatch, cap: list[str]) -> None:
    config = tiny(*cap)
    start = clone(config)
    records_too_much(monkeypatch, 1e-3)
    with pytest.raises(Exception, match=r"max \|log ratio\| is 0.001") as raised:
        first_iteration(config, start)
    assert ObjectiveError.__name__ in repr(raised.value.__cause__ or raised.value)


@pytest.mark.parametrize("level", list(Level))
def test_the_loss_carries_the_truncated_ratio_at_its_own_level(level: Level) -> None:
    """-sum w min(rho, cap) A where the ratio itself is 1."""
    draw = torch.Generator().manual_seed(0)
    shape = (5, 2, 3)
    old, recorded = (torch.randn(shape, generator=draw) / 3 for _ in range(2))
    valid = torch.tensor([[True, True]] * 4 + [[True, False]])
    advantages = torch.randn(5, 1, generator=draw).expand(5, 2) if level is Level.chunk else torch.randn(5, 2)
    rows = TrainingBlock(*({}, {}, old, valid, advantages, valid.float(), None, None, None), rollout_log_probs=recorded)
    scored = Evaluation(old.clone().requires_grad_())
    cap = 1.1
    algorithm = PPOConfig(ratio_level=level, tis_cap=cap)
    objective = Objective(algorithm, 1.0, lambda *rows: scored, lambda *rows: old, joint=False)
    (one,) = objective.policy_passes({0: rows}, {0: torch.arange(len(rows))})
    expected, counts = 0.0, valid[..., None].expand(shape)
    apart = torch.where(counts, old - recorded, 0.0)
    for i, c, k in counts.nonzero().tolist():
        difference = {Level.token: apart[i, c, k], Level.action: apart[i, c].sum(), Level.chunk: apart[i].sum()}[level]
        expected -= min(math.exp(difference), cap) * float(advantages[i, c]) / shape[2]
    sums = one.run()
    assert float(sums.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert one.weight == pytest.approx(float(sums.weight)) == 9  # valid actions: the correction is no part of it
