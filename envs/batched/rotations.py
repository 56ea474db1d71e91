"""ManiSkill's functions of poses and rotations for small batches, bit for bit, at a third of the time.

For a few dozen rows the calls cost more than the arithmetic: here each function makes a handful of NumPy calls, where
ManiSkill's makes thirty torch calls.  The operations and their order are the same, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock

import numpy as np
import torch
from mani_skill.agents.controllers import pd_ee_pose
from mani_skill.envs.utils.randomization import pose as randomized
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


def _fits(value: object) -> bool:
    tensor = value.raw_pose if isinstance(value, Pose) else value
    return isinstance(tensor, Tensor) and tensor.dtype is torch.float32 and tensor.is_cpu and not tensor.requires_grad


def with_fallback(stock: Callable, fast: Callable) -> Callable:
    """Returns a function that calls `fast` for plain float32 CPU tensors, else or on NotImplemented `stock`."""

    @wraps(stock)
    def function(*values: object, **named: object) -> object:
        fits = all(map(_fits, values)) and all(map(_fits, named.values()))
        with np.errstate(all="ignore"):  # torch does not warn either
            result = fast(*values, **named) if fits else NotImplemented
        return stock(*values, **named) if result is NotImplemented else result

    return function


def quaternion_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of quaternions [..., 4], real part first, or its negative if its real part is negative."""
    return torch.from_numpy(_composed(a.numpy(), b.numpy()))


def inverse(pose: Pose) -> Pose:
    """Returns the inverses of poses."""
    values = pose.raw_pose.numpy().copy()
    values[..., 4:] = -values[..., 4:]
    values[..., :3] = turned(values[..., 3:], -values[..., :3])
    return Pose(torch.from_numpy(values))


def pose_product(a: Pose, b: Pose) -> Pose:
    """Returns the products a b: poses b, relative to a, in the frame of a; N of each, or one of either."""
    left, right = a.raw_pose.numpy(), b.raw_pose.numpy()
    if left.ndim != 2 or right.ndim != 2 or (len(left) != len(right) and 1 not in (len(left), len(right))):
        return NotImplemented
    values = np.empty((max(len(left), len(right)), 7), np.float32)
    values[:, :3] = left[:, :3] + turned(left[:, 3:], right[:, :3])
    values[:, 3:] = _composed(left[:, 3:], right[:, 3:])
    return Pose(torch.from_numpy(values))


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    terms = (a[..., _LEFT] * _SIGN) * b[..., _RIGHT]
    product = terms[..., 0] + terms[..., 1]
    product += terms[..., 2]
    product += terms[..., 3]
    return product


def _composed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = _product(a, b)
    return np.where(product[..., :1] < 0, -product, product)


def turned(quaternions: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Returns points [N, 3] turned by quaternions [N, 4]."""
    pure = np.zeros((*points.shape[:-1], 4), points.dtype)
    pure[..., 1:] = points
    return _product(_product(quaternions, pure), quaternions * _SIGN[0])[..., 1:]


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


# The faster functions replace ManiSkill's: tasks call these by name, build poses with `Pose.create`, and Python looks
# operators up in the class.
_PLACES = tuple(
    (owner, name, getattr(owner, name), with_fallback(getattr(owner, name), fast))
    for owner, name, fast in (
        (pd_ee_pose, "quaternion_multiply", quaternion_multiply),  # imported by name, as are the others here
        (pd_ee_pose, "matrix_to_quaternion", matrix_to_quaternion),
        (randomized, "matrix_to_quaternion", matrix_to_quaternion),
        (Pose, "inv", inverse),
        (Pose, "__mul__", pose_product),
        (Pose, "to_transformation_matrix", to_transformation_matrix),
    )
)
_depth = 0  # number of active `few_operations` contexts, in all threads
_lock = Lock()


def _enter(change: int) -> None:
    global _depth
    with _lock:
        _depth += change
        if _depth == (change == 1):  # the first one comes, or the last one goes
            for owner, name, stock, fast in _PLACES:
                setattr(owner, name, fast if _depth else stock)


@contextmanager
def few_operations() -> Iterator[None]:
    """Within it, ManiSkill computes with the functions of `rotations`, and torch's do nothing but compute.

    They record no gradients, which physics would not propagate, and skip function modes, such as that of
    `with torch.device("cpu")`, which tasks use and which costs 5 us per operation.  Contexts may be nested.
    """
    _enter(1)
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
            yield
    finally:
        _enter(-1)
