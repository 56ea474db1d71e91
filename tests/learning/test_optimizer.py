from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlinf_embodied.errors import CheckpointError, ObjectiveError
from rlinf_embodied.learning.optimizer import AdamSettings, FlatOptimizer, ParameterGroup, linear_decay, one_cycle

SETTINGS = AdamSettings(1e-2, (0.9, 0.999), math.inf)


def make_net(seed: int = 0) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    return net


def optimizer_of(parameters: Iterable[nn.Parameter], settings: AdamSettings = SETTINGS) -> FlatOptimizer:
    return FlatOptimizer({"all": ParameterGroup(list(parameters), settings)})


def gradient_of(net: nn.Module, step: int) -> Tensor:
    """Leaves a gradient that depends on the weights in the net and returns it flat."""
    draw = torch.Generator().manual_seed(100 + step)
    net.zero_grad()
    net(torch.randn(4, 5, generator=draw)).square().sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize(("weight_decay", "bound"), [(0.0, math.inf), (0.1, 0.5)])
def test_steps_equal_those_of_torch(weight_decay, bound):
    ours, theirs = make_net(), make_net()
    settings = AdamSettings(1e-2, (0.9, 0.999), bound, eps=1e-5, weight_decay=weight_decay)
    optimizer = optimizer_of(ours.parameters(), settings)
    reference = torch.optim.AdamW(theirs.parameters(), 1e-2, eps=1e-5, weight_decay=weight_decay)
    for step in range(20):
        optimizer.rates["all"] = reference.param_groups[0]["lr"] = 1e-2 / (step + 1)
        norm = optimizer.step(gradient_of(ours, step))
        gradient_of(theirs, step)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), bound)
        reference.step()
        assert norm == pytest.approx(float(expected), rel=1e-4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_clipping_keeps_the_direction_and_needs_no_second_gradient():
    weights = nn.Parameter(torch.zeros(2))
    optimizer = optimizer_of([weights], AdamSettings(1.0, (0.0, 0.0), 1.0, eps=1.0))
    gradient = torch.tensor([3.0, 4.0])
    assert optimizer.step(gradient) == 5.0
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
    # clipped to (.6, .8); without memory a step is g / (|g| + 1)
    torch.testing.assert_close(weights.data, torch.tensor([-0.6 / 1.6, -0.8 / 1.8]))


def grouped(net: nn.Module, first: AdamSettings, second: AdamSettings) -> FlatOptimizer:
    parameters = list(net.parameters())
    groups = {"trunk": ParameterGroup(parameters[:2], first), "head": ParameterGroup(parameters[2:], second)}
    return FlatOptimizer(groups)


@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_groups_with_equal_settings_are_one_group(max_norm):
    one, two = make_net(), make_net()
    settings = replace(SETTINGS, max_grad_norm=max_norm)
    single, several = optimizer_of(one.parameters(), settings), grouped(two, settings, settings)
    for step in range(5):
        assert single.step(gradient_of(one, step)) == several.step(gradient_of(two, step))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_each_group_has_its_own_rate():
    nets, head = (make_net(), make_net(), make_net()), replace(SETTINGS, lr=1e-1)
    grouped(nets[0], SETTINGS, head).step(gradient_of(nets[0], 0))
    for net, settings, kept in ((nets[1], SETTINGS, slice(0, 2)), (nets[2], head, slice(2, 4))):
        optimizer_of(net.parameters(), settings).step(gradient_of(net, 0))
        for a, b in zip(list(nets[0].parameters())[kept], list(net.parameters())[kept], strict=True):
            assert torch.equal(a, b)


def test_a_group_that_makes_no_step_keeps_weights_and_moments():
    net = make_net()
    optimizer = grouped(net, SETTINGS, SETTINGS)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step(gradient_of(net, 0), only=("head",))
    same = [torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert same == [True, True, False, False]
    state = optimizer.export_state()
    assert state["steps"].tolist() == [0, 1]
    assert not state["mean"][: sum(p.numel() for p in before[:2])].any()
    assert state["mean"][sum(p.numel() for p in before[:2]) :].any()


def test_a_restored_optimizer_continues_bit_for_bit():
    straight, resumed = make_net(), make_net()
    first = optimizer_of(straight.parameters())
    other = optimizer_of(resumed.parameters())
    for step in range(3):
        first.step(gradient_of(straight, step))
        other.step(gradient_of(resumed, step))
    state = deepcopy(other.export_state())
    other.step(gradient_of(resumed, 99))
    resumed.load_state_dict(straight.state_dict())
    other = optimizer_of(resumed.parameters())
    other.import_state(state)
    for step in range(3, 6):
        first.step(gradient_of(straight, step))
        other.step(gradient_of(resumed, step))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    net = make_net()
    optimizer = optimizer_of(net.parameters())
    optimizer.step(gradient_of(net, 0))
    weights, state = [p.clone() for p in net.parameters()], deepcopy(optimizer.export_state())
    gradient = gradient_of(net, 1)
    gradient[3] = bad
    with pytest.raises(ObjectiveError, match=r"norm is (nan|inf), so the weights would be lost"):
        optimizer.step(gradient)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert all(torch.equal(state[name], tensor) for name, tensor in optimizer.export_state().items())


def test_state_of_other_parameters_is_refused():
    optimizer = optimizer_of([nn.Parameter(torch.zeros(3))])
    for state in ({}, optimizer_of([nn.Parameter(torch.zeros(4))]).export_state()):
        with pytest.raises(CheckpointError, match="another policy or algorithm"):
            optimizer.import_state(state)


def test_what_cannot_be_trained_is_refused():
    weights = nn.Parameter(torch.zeros(2))
    for parameters, reason in (
        ([], "is empty"),
        ([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], "bfloat16"),
        ([weights, weights], "twice"),
    ):
        with pytest.raises(ObjectiveError, match=reason):
            optimizer_of(parameters)


def test_linear_decay_goes_from_lr_to_its_fraction_at_the_last_iteration():
    assert [linear_decay(k, 11, 2.0, 0.1) for k in (0, 5, 10)] == pytest.approx([2.0, 1.1, 0.2])
    assert linear_decay(0, 1, 2.0, 0.1) == 2.0
    assert [linear_decay(k, 11, 2.0, 1.0, warmup=3) for k in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert linear_decay(50, 11, 2.0, 0.1) == pytest.approx(0.2)


@pytest.mark.parametrize(("num_steps", "warmup"), [(2, 0.1), (11, 0.3), (97, 0.1)])
def test_one_cycle_is_that_of_torch(num_steps, warmup):
    weights = nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([weights], 1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(reference, 0.01, total_steps=num_steps, pct_start=warmup)
    for step in range(num_steps):
        assert one_cycle(step, num_steps, 0.01, warmup) == pytest.approx(reference.param_groups[0]["lr"], rel=1e-6)
        reference.step()
        if step + 1 < num_steps:
            schedule.step()
