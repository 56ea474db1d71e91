"""Losses on transitions against loops over single ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlinf_embodied.algorithms.critics import critic_loss, move_towards
from rlinf_embodied.algorithms.iql import advantage_weights, expectile_loss
from rlinf_embodied.algorithms.sac import entropy_coef_loss, policy_loss, soft_target

E, M = 3, 5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_soft_target_is_that_of_each_transition() -> None:
    rewards, ends, after, log_probs = drawn(M), torch.tensor([0.0, 1, 0, 0, 1]), drawn(E, M), drawn(M) - 1
    found = soft_target(rewards, ends, after, log_probs, 0.2, 0.9)
    for m in range(M):
        least = min(float(after[e, m]) for e in range(E))
        goes_on = 0.0 if ends[m] else 0.9 * (least - 0.2 * float(log_probs[m]))
        assert float(found[m]) == pytest.approx(float(rewards[m]) + goes_on, rel=1e-5)


def test_losses_are_sums() -> None:
    values, targets, log_probs = drawn(E, M), drawn(M), drawn(M)
    squares = [(float(values[e, m]) - float(targets[m])) ** 2 for e in range(E) for m in range(M)]
    assert float(critic_loss(values, targets)) == pytest.approx(sum(squares) / 2, rel=1e-5)
    for pessimistic, best in ((True, min), (False, lambda q: sum(q) / len(q))):
        each = [0.3 * float(log_probs[m]) - best([float(v) for v in values[:, m]]) for m in range(M)]
        assert float(policy_loss(values, log_probs, 0.3, pessimistic)) == pytest.approx(sum(each), rel=1e-5)


def test_the_entropy_coefficient_rises_where_the_entropy_is_too_small() -> None:
    log_coef = torch.zeros((), requires_grad=True)
    for log_prob, sign in ((5.0, -1), (-5.0, 1)):  # of an entropy below, and above, a target of 2
        (slope,) = torch.autograd.grad(entropy_coef_loss(log_coef, torch.full((M,), log_prob), -2.0), [log_coef])
        assert float(slope) == -M * (log_prob - 2.0)
        assert math.copysign(1, float(slope)) == sign


def test_targets_move_by_a_share() -> None:
    target, source = nn.Parameter(torch.tensor([0.0, 4.0])), nn.Parameter(torch.tensor([1.0, 0.0]))
    move_towards([target], [source], 0.25)
    assert target.tolist() == [0.25, 3.0]


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.9])
def test_the_expectile_loss_is_least_at_the_expectile(expectile) -> None:
    value = torch.tensor(expectile, requires_grad=True)  # the expectile of 0 and 1
    (slope,) = torch.autograd.grad(expectile_loss(torch.tensor([0.0, 1.0]) - value, expectile), [value])
    assert float(slope) == pytest.approx(0.0, abs=1e-6)


def test_weights_grow_with_the_advantage_up_to_a_limit() -> None:
    found = advantage_weights(torch.tensor([-1.0, 0.0, 1.0, 9.0]), 3.0, 50.0).tolist()
    assert found == pytest.approx([math.exp(-3), 1.0, math.exp(3), 50.0], rel=1e-5)
