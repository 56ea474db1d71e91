"""A stage's state is a copy, and comes back whole or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.learning.snapshot import StageState, kept


def module(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(3, 2)
    made.bias.requires_grad_(False)
    return made


def test_a_state_is_a_copy_of_what_training_may_change() -> None:
    first, second = module(0), module(1)
    moments = {"mean": torch.ones(6)}
    state = StageState.of(first, 4, {"optimizer": moments})
    weight, bias = first.weight.detach().clone(), second.bias.detach().clone()
    with torch.no_grad():
        first.weight.zero_()
    moments["mean"].zero_()
    groups = kept([None, state]).install(second)
    assert torch.equal(second.weight, weight)
    assert torch.equal(second.bias, bias)  # frozen
    assert torch.equal(groups["optimizer"]["mean"], torch.ones(6))
    assert state.weights.version == 4
    StageState.of(module(0), 4, {}, whole=True).install(second)
    assert torch.equal(second.bias, first.bias)


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_a_damaged_state_is_not_installed(part: str) -> None:
    state, other = StageState.of(module(0), 1, {"optimizer": {"mean": torch.ones(6)}}), module(1)
    before = other.weight.detach().clone()
    damaged = state.weights.tensors["weight"] if part == "weights" else state.groups["optimizer"]["mean"]
    damaged[0] += 1
    with pytest.raises(ObjectiveError, match="arrived damaged"):
        state.install(other)
    assert torch.equal(other.weight, before)
