"""Mismatch numbers against hand counts and the exact KL; truncated weights against their definition."""

import math

import pytest
import torch

from rlinf_embodied.algorithms.off_policy import joined, mismatch, mismatch_metrics, truncated_importance_weights

MASK = torch.tensor([[True, True, False], [True, False, False]])
BEHAVIOUR = torch.tensor([[-1.0, -2.0, torch.nan], [-0.5, torch.nan, torch.nan]])
TRAINING = torch.tensor([[-1.0, -1.0, 7.0], [-2.5, 7.0, torch.nan]])  # differences 0, 1, -2


def test_mismatch_is_the_mean_and_largest_difference_of_counted_tokens():
    found = mismatch_metrics(mismatch(TRAINING, BEHAVIOUR, MASK))
    # k3: e^0 - 1 - 0, e^1 - 1 - 1, e^-2 - 1 + 2
    kl = (0.0 + (math.e - 2) + (math.exp(-2) + 1)) / 3
    expected = {
        "losses/mismatch_mean": 1.0,
        "losses/mismatch_max": 2.0,
        "losses/mismatch_kl": kl,
        "losses/mismatch_ratio": (1 + math.e + math.exp(-2)) / 3,
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_blocks_add_up():
    parts = [mismatch(TRAINING[i : i + 1], BEHAVIOUR[i : i + 1], MASK[i : i + 1]) for i in (0, 1)]
    torch.testing.assert_close(joined(parts), mismatch(TRAINING, BEHAVIOUR, MASK))


def test_nothing_to_count_is_not_a_number():
    found = mismatch_metrics(mismatch(TRAINING, BEHAVIOUR, torch.zeros_like(MASK)))
    assert math.isnan(found["losses/mismatch_mean"])
    assert found["losses/mismatch_max"] == 0


def test_the_estimate_is_the_kl_in_expectation_and_keeps_small_differences():
    g = torch.Generator().manual_seed(0)
    rollout, training = (torch.randn(12, generator=g).log_softmax(-1) for _ in range(2))
    exact = float((rollout.exp() * (rollout - training)).sum())
    # every token, as often as it would be drawn
    counts = (rollout.exp() * 200_000).round().long()
    tokens = torch.repeat_interleave(torch.arange(12), counts)
    found = mismatch_metrics(mismatch(training[tokens], rollout[tokens], torch.ones(len(tokens), dtype=torch.bool)))
    assert found["losses/mismatch_kl"] == pytest.approx(exact, rel=1e-3)
    assert found["losses/mismatch_ratio"] == pytest.approx(1.0, abs=1e-3)
    near = mismatch_metrics(mismatch(torch.tensor([-1.0 + 2.0**-20]), torch.tensor([-1.0]), torch.tensor([True])))
    assert near["losses/mismatch_kl"] == pytest.approx(2.0**-41, rel=1e-3)  # d^2 / 2


def test_weights_are_capped_ratios_without_a_gradient():
    training = TRAINING.clone().requires_grad_()
    weights = truncated_importance_weights(training, BEHAVIOUR, MASK, cap=2.0)
    expected = torch.tensor([[1.0, 2.0, 1.0], [math.exp(-2), 1.0, 1.0]])
    torch.testing.assert_close(weights, expected)
    assert not weights.requires_grad
