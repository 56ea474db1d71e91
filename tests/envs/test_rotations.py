"""Rotations of few rows in NumPy have the bits of ManiSkill's own."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.sim  # importing ManiSkill takes seconds

SIZES = [1, 3, 4, 31, 32, 1000]


def samples(num: int) -> list[Tensor]:
    """Quaternions [num, 4] in the strided form that poses have: any, unit, and the edges of every branch."""
    draw = torch.Generator().manual_seed(num)
    any_ = torch.randn(num, 7, generator=draw)
    unit = torch.cat([any_[:, :3], torch.nn.functional.normalize(any_[:, 3:], dim=1)], 1)
    edges = torch.eye(4).repeat(num, 1)[:num] * torch.where(torch.rand(num, 1, generator=draw) < 0.5, -1.0, 1.0)
    return [any_[:, 3:], unit[:, 3:], edges, torch.zeros(num, 4)]


def stock(name: str):
    from mani_skill.utils.geometry import rotation_conversions

    function = getattr(rotation_conversions, name)
    return getattr(function, "__wrapped__", function)  # the batched backend may have replaced it in this process


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


@pytest.mark.parametrize("num", SIZES)
def test_products_are_those_of_maniskill(num: int) -> None:
    from envs.batched.rotations import quaternion_product

    for a in samples(num):
        for b in samples(num):
            assert_same_bits(quaternion_product(a, b), stock("quaternion_raw_multiply")(a, b))
        assert_same_bits(quaternion_product(a, b[:1]), stock("quaternion_raw_multiply")(a, b[:1]))


@pytest.mark.parametrize("num", SIZES)
def test_matrices_and_back_are_those_of_maniskill(num: int) -> None:
    from envs.batched.rotations import matrix_to_quaternion, quaternion_to_matrix

    for q in samples(num)[:3]:
        matrix = quaternion_to_matrix(q)
        assert_same_bits(matrix, stock("quaternion_to_matrix")(q))
        assert_same_bits(matrix_to_quaternion(matrix), stock("matrix_to_quaternion")(matrix))


def test_gradients_and_doubles_take_the_stock_way() -> None:
    from envs.batched.rotations import quaternion_to_matrix, with_fallback

    function = with_fallback(stock("quaternion_to_matrix"), quaternion_to_matrix)
    q = torch.randn(3, 4, requires_grad=True)
    function(q).sum().backward()
    assert q.grad is not None
    assert function(torch.randn(3, 4, dtype=torch.float64)).dtype is torch.float64
