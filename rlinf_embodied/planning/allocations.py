"""Which sizes a part of a cluster may have: every number of devices on small clusters, whole nodes on large ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.planning.frontier import Ints

EXACT_DEVICES = 16  # up to here every number of devices is tried
MAX_ALLOCATIONS = 16  # sizes per class on larger clusters


@dataclass(frozen=True, slots=True)
class Allocations:
    """Sizes that a part may have, as devices per class, and which two add up to which third."""

    counts: NDArray[np.int64]  # [n, classes]; the last one is the whole cluster
    first: Ints  # [pairs]
    second: Ints
    total: Ints


def is_small(num_devices: int) -> bool:
    """Returns whether every number of devices is tried."""
    return num_devices <= EXACT_DEVICES


def make_allocations(num_devices: Sequence[int], nodes: Sequence[int]) -> Allocations:
    """Returns the allocations for `num_devices` of each class, in whole nodes where there are many."""
    exact = is_small(sum(num_devices))
    per_class = max(2, round(MAX_ALLOCATIONS ** (1 / len(num_devices)))) if len(num_devices) > 1 else MAX_ALLOCATIONS
    units = [1 if exact else _unit(n, node, per_class) for n, node in zip(num_devices, nodes, strict=True)]
    steps = [max(1, n // unit) for n, unit in zip(num_devices, units, strict=True)]
    levels = np.array([level for level in itertools.product(*(range(k + 1) for k in steps)) if sum(level)])
    weights = np.cumprod([1, *(k + 1 for k in steps[:-1])])
    index_of = {int(level @ weights): i for i, level in enumerate(levels)}
    first, second = np.triu_indices(len(levels), 0)
    first, second = np.concatenate([first, second]), np.concatenate([second, first])
    keys = np.unique(np.stack([first, second]), axis=1)
    first, second = keys[:, (levels[keys[0]] + levels[keys[1]] <= np.array(steps)).all(axis=1)]
    total = np.array([index_of[int(level @ weights)] for level in levels[first] + levels[second]], dtype=np.int64)
    whole = np.where(levels == np.array(steps), np.array(num_devices), levels * np.array(units))
    return Allocations(whole, first, second, total)


def _unit(num_devices: int, node: int, per_class: int) -> int:
    """Returns by how many devices allocations differ: whole nodes, or an even part of one where there are few nodes."""
    least = -(-num_devices // per_class)
    inside = [part for part in range(1, node) if node % part == 0 and part >= least]
    return min(inside) if inside else node * -(-num_devices // (node * per_class))
