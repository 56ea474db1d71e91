"""ManiSkill's rotation functions for small batches, bit for bit, at a third of the time.

A few dozen quaternions are less work than the calls that handle them: here each function is a handful of NumPy calls
where ManiSkill's has thirty of torch.  The operations and their order are the same, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np
import torch
from torch import Tensor

# out[c] = sum over t, from the left, of SIGN[c, t] * a[LEFT[c, t]] * b[RIGHT[c, t]]
_LEFT = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
_RIGHT = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_SIGN = np.array([[1, -1, -1, -1], [1, 1, 1, -1], [1, -1, 1, 1], [1, 1, -1, 1]], np.float32)


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and not tensor.requires_grad


def with_fallback(stock: Callable[..., Tensor], fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `fast` for plain float32 CPU tensors, and `stock` for all others."""

    @wraps(stock)
    def function(*tensors: Tensor) -> Tensor:
        return (fast if all(map(_fits, tensors)) else stock)(*tensors)

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
    rows = quaternions.numpy().reshape(-1, 4)
    square = rows * rows
    r, i, j, k = rows.T
    _, ii, jj, kk = square.T
    ij, ik, jk, ir, jr, kr = i * j, i * k, j * k, i * r, j * r, k * r
    entries = np.stack((jj + kk, ij - kr, ik + jr, ij + kr, ii + kk, jk - ir, ik - jr, jk + ir, ii + jj))
    entries *= np.float32(2.0) / (((square[:, 0] + ii) + jj) + kk)
    entries[::4] = 1.0 - entries[::4]
    return torch.from_numpy(entries.T.reshape(*quaternions.shape[:-1], 3, 3))


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
