"""Keyed draws: every random number is a pure function of (run seed, purpose, ids), never of rank, shard or process."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

TRAINING_SEED_BIT = 1 << 30  # reset seeds of training have it, those of evaluation do not: the two sets are disjoint
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words; passes BigCrush on counters."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def words(seed: int, purpose: str, *ids: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns 64-bit words keyed by (seed, purpose, ids).

    Args:
        seed: run seed.
        purpose: name of the use, for example "action"; other purposes give unrelated words.
        ids: integers or integer arrays that broadcast against each other (env id, iteration, step, ...).

    Returns:
        uint64, in the broadcast shape of `ids`.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seed, dtype=np.int64).astype(np.uint64) ^ np.uint64(zlib.crc32(purpose.encode())))
        for part in ids:
            state = _mix(state ^ _mix(np.asarray(part, dtype=np.int64).astype(np.uint64)))
    return state


def uniform(seed: int, purpose: str, *ids: int | Sequence[int] | np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Returns float32 uniforms in (0, 1), of the broadcast shape of `ids` followed by `shape`."""
    key = words(seed, purpose, *ids)
    if shape:
        size = int(np.prod(shape))
        with np.errstate(over="ignore"):
            key = _mix(key[..., None] ^ _mix(np.arange(size, dtype=np.uint64))).reshape(*key.shape, *shape)
    return ((key >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def normal(seed: int, purpose: str, *ids: int | Sequence[int] | np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Returns float32 standard normals by Box and Muller's transform of two keyed uniforms; shapes as `uniform`."""
    radius = np.sqrt(-2.0 * np.log(uniform(seed, purpose + "/radius", *ids, shape=shape).astype(np.float64)))
    angle = 2.0 * np.pi * uniform(seed, purpose + "/angle", *ids, shape=shape).astype(np.float64)
    return (radius * np.cos(angle)).astype(np.float32)


def reset_seed(seed: int, *ids: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns reset seeds for training episodes, int64 in [2^30, 2^31)."""
    return (words(seed, "reset", *ids) >> np.uint64(34)).astype(np.int64) | TRAINING_SEED_BIT


def permutation(seed: int, purpose: str, *ids: int, size: int) -> np.ndarray:
    """Returns a permutation of range(size), int64: the order of `size` keyed words (ties by position)."""
    with np.errstate(over="ignore"):
        keys = _mix(words(seed, purpose, *ids) ^ _mix(np.arange(size, dtype=np.uint64)))
    return np.argsort(keys, kind="stable")
