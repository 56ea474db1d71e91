"""The losses of implicit Q-learning; those of SAC are compared with another implementation in tests/control."""

from __future__ import annotations

import pytest
import torch

from rlinf_embodied.algorithms.iql import expectile_loss


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.9])
def test_the_expectile_loss_is_least_at_the_expectile(expectile) -> None:
    value = torch.tensor(expectile, requires_grad=True)  # the expectile of 0 and 1
    (slope,) = torch.autograd.grad(expectile_loss(torch.tensor([0.0, 1.0]) - value, expectile), [value])
    assert float(slope) == pytest.approx(0.0, abs=1e-6)
