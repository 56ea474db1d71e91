"""Minibatches over blocks: the slices of an epoch cover each block once, and gradients add up to the joint one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.learning.optimizer import FlatOptimizer
from rlinf_embodied.learning.reduce import ExactReducer
from rlinf_embodied.learning.update import LossSums, gradient_sums, minibatch_step, slices

SIZES = {0: 5, 1: 0, 2: 8, 3: 3}


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def data() -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {block: torch.randn(size, 4, generator=draw) for block, size in SIZES.items()}


def loss_of(model: nn.Linear, columns: dict[int, Tensor]):
    def loss(block: int, index: Tensor) -> Iterator[LossSums]:
        for part in index.split(3):  # a block may come in parts
            errors = (model(columns[block][part]) - 1.0).square()
            yield LossSums(errors.sum(), torch.tensor(float(len(part))), errors.detach().sum().reshape(1))

    return loss


def all_rows() -> dict[int, Tensor]:
    return {block: torch.arange(size) for block, size in SIZES.items()}


def test_gradients_of_blocks_add_up_to_that_of_the_joint_batch(model) -> None:
    reducer = ExactReducer(SoloGroup(), [0] * 4)
    parameters = list(model.parameters())
    gradient, weight, statistics = gradient_sums(all_rows(), loss_of(model, data()), parameters, 1, reducer)
    joint = (model(torch.cat([*data().values()])) - 1.0).square().sum()
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(joint, parameters)])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert weight == 16
    assert float(statistics[0]) == pytest.approx(float(joint.detach()), rel=1e-5)


def test_workers_get_the_bits_of_one_and_stay_equal(model) -> None:
    owners = [0, 1, 0, 1]
    groups = ThreadGroup.make(2, timeout_s=30)

    def worker(rank: int) -> Tensor:
        own = nn.Linear(4, 1)
        own.load_state_dict(model.state_dict())
        rows = {b: index for b, index in all_rows().items() if owners[b] == rank}
        optimizer = FlatOptimizer(list(own.parameters()), 0.1)
        for _ in range(3):
            minibatch_step(rows, loss_of(own, data()), optimizer, 1, ExactReducer(groups[rank], owners))
        return torch.cat([p.detach().reshape(-1) for p in own.parameters()])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(worker, range(2))
    optimizer = FlatOptimizer(list(model.parameters()), 0.1)
    for _ in range(3):
        minibatch_step(all_rows(), loss_of(model, data()), optimizer, 1, ExactReducer(SoloGroup(), [0] * 4))
    alone = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(first, second)
    assert torch.equal(first, alone)


def test_a_step_uses_the_mean_gradient_over_all_blocks(model) -> None:
    reducer = ExactReducer(SoloGroup(), [0] * 4)
    gradient, weight, _ = gradient_sums(all_rows(), loss_of(model, data()), list(model.parameters()), 1, reducer)
    optimizer = FlatOptimizer(list(model.parameters()), 0.1)
    _, _, norm = minibatch_step(all_rows(), loss_of(model, data()), optimizer, 1, reducer)
    assert norm == pytest.approx(float((gradient / weight).norm()), rel=1e-5)


@pytest.mark.parametrize("reason", ["veto", "nothing"])
def test_no_step_is_made_where_it_is_forbidden_or_there_is_nothing_to_learn_from(model, reason: str) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    rows = all_rows() if reason == "veto" else {block: torch.arange(0) for block in SIZES}
    seen = []

    def veto(statistics: Tensor, weight: float) -> bool:
        seen.append((float(statistics[0]), weight))
        return True

    optimizer = FlatOptimizer(list(model.parameters()), 0.1)
    reducer = ExactReducer(SoloGroup(), [0] * 4)
    statistics, weight, norm = minibatch_step(rows, loss_of(model, data()), optimizer, 1, reducer, veto)
    assert norm is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert seen == ([(float(statistics[0]), weight)] if reason == "veto" else [])


def test_parameters_that_a_loss_does_not_reach_get_zeros() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    loss = lambda block, index: [LossSums((used * 2).sum(), torch.tensor(1.0), torch.zeros(1))]  # noqa: E731
    rows = {0: torch.arange(1)}
    gradient, _, _ = gradient_sums(rows, loss, [unused, used], 1, ExactReducer(SoloGroup(), [0]))
    assert gradient.tolist() == [0, 0, 0, 2, 2]


@given(size=st.integers(0, 40), parts=st.integers(1, 9), epoch=st.integers(0, 5), block=st.integers(0, 5))
def test_slices_partition_a_block_evenly(size: int, parts: int, epoch: int, block: int) -> None:
    cut = slices(7, "policy", 3, epoch, block, size, parts)
    assert len(cut) == parts
    assert sorted(torch.cat(cut).tolist()) == list(range(size))
    lengths = [len(part) for part in cut]
    assert max(lengths) - min(lengths) <= 1


def test_slices_differ_by_seed_purpose_iteration_epoch_and_block() -> None:
    keys = [(7, "policy", 3, 1, 0), (8, "policy", 3, 1, 0), (7, "value", 3, 1, 0)]
    keys += [(7, "policy", 4, 1, 0), (7, "policy", 3, 2, 0), (7, "policy", 3, 1, 1)]
    orders = {tuple(torch.cat(slices(*key, 50, 5)).tolist()) for key in keys}
    assert len(orders) == len(keys)
    assert tuple(torch.cat(slices(*keys[0], 50, 2)).tolist()) in orders  # the number of slices only moves the cuts
