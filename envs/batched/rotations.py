"""ManiSkill's functions of rotations, angles and actions for small batches, bit for bit, at a third of the time.

A few dozen rows are less work than the calls that handle them: here each function is a handful of NumPy calls
where ManiSkill's has thirty of torch.  The operations and their order are the same, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np
import torch
from mani_skill.utils.structs import Pose
from torch import Tensor

# out[c] = sum over t, from the left, of SIGN[c, t] * a[LEFT[c, t]] * b[RIGHT[c, t]]
_LEFT = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
_RIGHT = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_SIGN = np.array([[1, -1, -1, -1], [1, 1, 1, -1], [1, -1, 1, 1], [1, 1, -1, 1]], np.float32)
# entry e of a rotation matrix holds FACTORS[0, 0, e] * FACTORS[1, 0, e] + FACTORS[0, 1, e] * FACTORS[1, 1, e] of
# (r, i, j, k, -r, -i, -j, -k)
_FACTORS = np.array(
    [
        [[2, 1, 1, 1, 1, 2, 1, 2, 1], [3, 7, 2, 3, 3, 5, 6, 1, 2]],
        [[2, 2, 3, 2, 1, 3, 3, 3, 1], [3, 0, 0, 0, 3, 0, 0, 0, 2]],
    ]
)
_ROTATION = np.array([0, 1, 2, 4, 5, 6, 8, 9, 10])  # its entries in those of a 4 x 4 matrix


def _fits(value: Tensor | Pose) -> bool:
    tensor = value.raw_pose if isinstance(value, Pose) else value
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and not tensor.requires_grad


def with_fallback(stock: Callable[..., Tensor], fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `fast` for plain float32 CPU tensors, and `stock` for all others and where `fast` is NotImplemented."""

    @wraps(stock)
    def function(*tensors: Tensor | Pose) -> Tensor:
        result = fast(*tensors) if all(map(_fits, tensors)) else NotImplemented
        return stock(*tensors) if result is NotImplemented else result

    return function


def quaternion_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the Hamilton product a b of quaternions [..., 4], real part first."""
    terms = (a.numpy()[..., _LEFT] * _SIGN) * b.numpy()[..., _RIGHT]
    product = terms[..., 0] + terms[..., 1]
    product += terms[..., 2]
    product += terms[..., 3]
    return torch.from_numpy(product)


def quaternion_to_matrix(quaternions: Tensor) -> Tensor:
    """Returns the rotation matrices [..., 3, 3] of quaternions [..., 4], real part first."""
    entries = _rotation_entries(quaternions.numpy().reshape(-1, 4).T)
    return torch.from_numpy(entries.T.reshape(*quaternions.shape[:-1], 3, 3))


def to_transformation_matrix(pose: Pose) -> Tensor:
    """Returns the matrices [N, 4, 4] of poses."""
    values = pose.raw_pose.numpy()
    if values.ndim != 2:
        return NotImplemented
    matrices = np.zeros((len(values), 16), np.float32)
    matrices[:, _ROTATION] = _rotation_entries(values[:, 3:].T).T
    matrices[:, 3:12:4] = values[:, :3]
    matrices[:, 15] = 1.0
    return torch.from_numpy(matrices.reshape(-1, 4, 4))


def _rotation_entries(quaternions: np.ndarray) -> np.ndarray:
    """Returns the entries of rotation matrices, row by row [9, N], of quaternions [4, N]."""
    signed = np.concatenate((quaternions, -quaternions))
    factors = signed[_FACTORS]
    products = factors[0] * factors[1]
    entries = products[0] + products[1]
    squares = quaternions * quaternions
    length = squares[0] + squares[1]
    length += squares[2]
    length += squares[3]
    entries *= np.float32(2.0) / length
    entries[::4] = 1.0 - entries[::4]
    return entries


def compute_angle_between(a: Tensor, b: Tensor) -> Tensor:
    """Returns the angles between vectors [N, 3] in rad; pi / 2 where one is zero."""
    if a.shape != b.shape:
        return NotImplemented
    if not b.numpy().any() and np.isfinite(a.numpy()).all():  # as the contact forces of fingers are most of the time
        cosine = torch.zeros(len(a))
    else:
        cosine = torch.bmm(_unit(a)[:, None, :], _unit(b)[:, :, None])[:, 0, 0]  # the sum that einsum makes
    return torch.arccos(torch.clip(cosine, -1, 1))


def _unit(vectors: Tensor) -> Tensor:
    length = torch.linalg.norm(vectors, axis=1).numpy()  # NumPy's has other last bits
    length[length < 1e-6] = 1.0
    return torch.from_numpy(vectors.numpy() * (np.float32(1.0) / length)[:, None])


def clip_and_scale_action(action: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns actions [N, A], clipped to [-1, 1], in the range from low to high [A]."""
    half = np.float32(0.5)
    low, high = low.numpy(), high.numpy()
    clipped = np.minimum(np.maximum(action.numpy(), np.float32(-1.0)), np.float32(1.0))
    return torch.from_numpy(half * (high + low) + half * (high - low) * clipped)


def matrix_to_quaternion(matrices: Tensor) -> Tensor:
    """Returns unit quaternions [..., 4], real part first and not negative, of rotation matrices [..., 3, 3]."""
    m = matrices.numpy().reshape(-1, 9).T
    m00, m01, m02, m10, m11, m12, m20, m21, m22 = m
    plus, minus = 1.0 + m00, 1.0 - m00
    squares = np.stack((plus + m11 + m22, plus - m11 - m22, minus + m11 - m22, minus - m11 + m22))
    positive = np.maximum(squares, 0.0)
    doubled = torch.from_numpy(positive).sqrt_().numpy()  # 2 |r|, 2 |i|, 2 |j|, 2 |k|; NumPy's root has other last bits
    best = doubled.argmax(0)
    x, y, z = m21 - m12, m02 - m20, m10 - m01
    xy, xz, yz = m10 + m01, m02 + m20, m12 + m21
    r, i, j, k = doubled * doubled
    candidates = np.stack(
        (np.stack((r, x, y, z)), np.stack((x, i, xy, xz)), np.stack((y, xy, j, yz)), np.stack((z, xz, yz, k)))
    )
    rows = np.arange(len(best))
    chosen = candidates[best, :, rows] / (2.0 * np.maximum(doubled[best, rows], np.float32(0.1)))[:, None]
    chosen = np.where(chosen[:, :1] < 0, -chosen, chosen)
    return torch.from_numpy(chosen.reshape(*matrices.shape[:-2], 4))
