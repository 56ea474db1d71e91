"""The losses of implicit Q-learning; those of SAC are compared with another implementation in tests/control."""

from __future__ import annotations

import math

import pytest
import torch

from rlinf_embodied.algorithms.iql import advantage_weights, expectile_loss


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.9])
def test_the_expectile_loss_is_least_at_the_expectile(expectile) -> None:
    value = torch.tensor(expectile, requires_grad=True)  # the expectile of 0 and 1
    (slope,) = torch.autograd.grad(expectile_loss(torch.tensor([0.0, 1.0]) - value, expectile), [value])
    assert float(slope) == pytest.approx(0.0, abs=1e-6)


def test_weights_grow_with_the_advantage_up_to_a_limit() -> None:
    found = advantage_weights(torch.tensor([-1.0, 0.0, 1.0, 9.0]), 3.0, 50.0).tolist()
    assert found == pytest.approx([math.exp(-3), 1.0, math.exp(3), 50.0], rel=1e-5)
