"""Poses, rotations, angles and actions of few rows in NumPy have the bits of ManiSkill's own."""

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


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("scale", [0.0, 1e-7, 0.1, 1.0, 50.0])
def test_angles_and_actions_are_those_of_maniskill(num: int, scale: float) -> None:
    from types import SimpleNamespace

    from mani_skill.agents.controllers.pd_ee_pose import PDEEPoseController
    from mani_skill.utils import common, gym_utils

    from envs.batched import rotations

    draw = torch.Generator().manual_seed(num)
    actions, low, high = scale * torch.randn(num, 7, generator=draw), *torch.randn(2, 6, generator=draw)
    a, b, actions = torch.randn(num, 3, generator=draw), actions[:, :3], actions[:, 1:]
    b[torch.rand(num, generator=draw) < 0.3] = 0.0
    angle, clip = unpatched(common, "compute_angle_between"), unpatched(gym_utils, "clip_and_scale_action")
    for x, y in ((a, b), (b, a), (a, 2 * a), (a, -a)):
        assert_same_bits(rotations.compute_angle_between(x, y), angle(x, y))
    assert_same_bits(rotations.clip_and_scale_action(actions, low, high), clip(actions, low, high))
    controller = SimpleNamespace(
        action_space_low=low, action_space_high=high, config=SimpleNamespace(rot_lower=-0.1), scene=None
    )
    scaled = unpatched(PDEEPoseController, "_clip_and_scale_action")(controller, actions)
    assert_same_bits(rotations.scale_pose_action(-0.1, actions, low, high), scaled)
    euler = stock("euler_angles_to_matrix")
    assert_same_bits(rotations.euler_angles_to_matrix(actions[:, 3:], "XYZ"), euler(actions[:, 3:], "XYZ"))


def test_other_shapes_and_conventions_take_the_stock_way() -> None:
    from mani_skill.utils import common
    from mani_skill.utils.geometry import rotation_conversions

    from envs.batched import rotations

    fast = rotations.with_fallback(unpatched(common, "compute_angle_between"), rotations.compute_angle_between)
    a, b = torch.randn(5, 3), torch.randn(1, 3)
    assert_same_bits(fast(a, b), unpatched(common, "compute_angle_between")(a, b))
    stock_euler = unpatched(rotation_conversions, "euler_angles_to_matrix")
    fast = rotations.with_fallback(stock_euler, rotations.euler_angles_to_matrix)
    assert_same_bits(fast(a, convention="ZYX"), stock_euler(a, "ZYX"))


def test_gradients_and_doubles_take_the_stock_way() -> None:
    from envs.batched.rotations import quaternion_to_matrix, with_fallback

    function = with_fallback(stock("quaternion_to_matrix"), quaternion_to_matrix)
    q = torch.randn(3, 4, requires_grad=True)
    function(q).sum().backward()
    assert q.grad is not None
    assert function(torch.randn(3, 4, dtype=torch.float64)).dtype is torch.float64
