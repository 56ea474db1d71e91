"""Poses and rotations of few rows in NumPy have the bits of ManiSkill's own."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.sim  # importing ManiSkill takes seconds

SIZES = [1, 4, 31, 1000]


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


def unpatched(owner: object, name: str):
    function = getattr(owner, name)
    return getattr(function, "__wrapped__", function)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


@pytest.mark.parametrize("num", SIZES)
def test_quaternions_of_matrices_are_those_of_maniskill(num: int) -> None:
    from envs.batched.rotations import matrix_to_quaternion

    for q in samples(num)[:3]:
        matrix = stock("quaternion_to_matrix")(q)
        assert_same_bits(matrix_to_quaternion(matrix), stock("matrix_to_quaternion")(matrix))


@pytest.mark.parametrize("num", SIZES)
def test_poses_are_those_of_maniskill(num: int) -> None:
    from mani_skill.utils.structs import Pose

    from envs.batched import rotations

    inverse, product = unpatched(Pose, "inv"), unpatched(Pose, "__mul__")
    draw = torch.Generator().manual_seed(num)
    poses = [Pose(torch.cat([torch.randn(num, 3, generator=draw), q], 1)) for q in samples(num)[:3]]
    for a in poses:
        assert_same_bits(rotations.inverse(a).raw_pose, inverse(a).raw_pose)
        matrices = unpatched(Pose, "to_transformation_matrix")(a)
        assert_same_bits(rotations.to_transformation_matrix(a), matrices)
        for b in (*poses, poses[0][:1]):
            assert_same_bits(rotations.pose_product(a, b).raw_pose, product(a, b).raw_pose)
            assert_same_bits(rotations.pose_product(b, a).raw_pose, product(b, a).raw_pose)
            assert_same_bits(rotations.quaternion_multiply(a.q, b.q), stock("quaternion_multiply")(a.q, b.q))


def test_gradients_and_doubles_take_the_stock_way() -> None:
    from envs.batched.rotations import quaternion_multiply, with_fallback

    function = with_fallback(stock("quaternion_multiply"), quaternion_multiply)
    q = torch.randn(3, 4, requires_grad=True)
    function(q, q).sum().backward()
    assert q.grad is not None
    doubles = torch.randn(3, 4, dtype=torch.float64)
    assert function(doubles, doubles).dtype is torch.float64
