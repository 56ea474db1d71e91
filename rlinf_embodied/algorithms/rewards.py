"""Shaping of rewards."""
# ruff: noqa: F722 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def overlong_penalty(lengths: Int[Tensor, " B"], longest: int, margin: int, penalty: float) -> Float[Tensor, " B"]:
    """Returns what each completion loses for its length: nothing up to longest - margin, then linearly `penalty`.

    (Soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13.)

    Args:
        lengths: tokens.
        longest: tokens at which a completion is cut off.
        margin: tokens before that over which the penalty rises; at least 1.
        penalty: at `longest`.
    """
    return ((lengths - (longest - margin)).clamp(min=0, max=margin) / margin) * penalty
