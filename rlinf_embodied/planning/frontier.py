"""Candidates of the planner as arrays: which are worth keeping, for each allocation of the cluster at once.

A candidate is kept if none of the same allocation is at least as good in every respect: time until its first output,
period, the same behind its last barrier, switches, weights, memory, and where its stages run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.planning import cost
from rlinf_embodied.planning.cost import Price

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Operator:
    """What made candidates, and from what: all that is needed to build their drafts."""

    kind: str
    name: str = ""
    classes: tuple[int, ...] = ()
    shards: int = 1
    resident: bool = True
    chunks: int = 1  # of both parts' fronts
    masks: tuple[int, int] = (0, 0)
    own_chunks: int = 1  # of a spatial node that hands everything on at its end


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates made by one operator; one entry per candidate, all arrays [n]."""

    operator: Operator
    state: Ints  # which allocation of the cluster
    price: Price
    left: Ints  # the candidate of the first part, in its front
    right: Ints


@dataclass(frozen=True, slots=True)
class Front:
    """The kept candidates of a set of stages, [allocations, width]; empty places have first_s = inf."""

    price: Price
    made_by: Ints  # which of `operators` a candidate came from
    left: Ints
    right: Ints
    operators: tuple[Operator, ...]

    @property
    def width(self) -> int:
        """Number of places per allocation."""
        return self.made_by.shape[1]


def flatten(price: Price, shape: tuple[int, ...]) -> Price:
    """Returns a price with every field broadcast to `shape` and flattened."""
    return Price(**{f.name: np.broadcast_to(getattr(price, f.name), shape).ravel() for f in fields(Price)})


def join(sets: Sequence[Candidates]) -> tuple[Price, Ints, Ints, Ints, Ints]:
    """Returns the candidates of all sets in one: price, state, number of the set, left, right."""
    price = Price(**{f.name: np.concatenate([getattr(b.price, f.name) for b in sets]) for f in fields(Price)})
    number = np.concatenate([np.full(len(candidates.state), i) for i, candidates in enumerate(sets)])
    state = np.concatenate([candidates.state for candidates in sets])
    return price, state, number, np.concatenate([b.left for b in sets]), np.concatenate([b.right for b in sets])


def fitting(candidates: Candidates, capacity_bytes: float, chunks: int) -> Candidates:
    """Returns the candidates that are possible and fit into memory."""
    seconds = cost.iteration_s(candidates.price, chunks)
    keep = np.flatnonzero(np.isfinite(seconds) & (candidates.price.peak_bytes <= capacity_bytes))
    return Candidates(
        candidates.operator,
        candidates.state[keep],
        cost.select(candidates.price, keep),
        candidates.left[keep],
        candidates.right[keep],
    )


def prune(sets: Sequence[Candidates], num_states: int, width: int, chunks: int, by_memory: bool = False) -> Front:
    """Returns the undominated candidates of each allocation, the fastest first, at most `width` of them.

    Where more than `width` are undominated, the last place goes to the one that holds the least memory.
    """
    price, state, number, left, right = join(sets)
    goal = price.peak_bytes if by_memory else cost.iteration_s(price, chunks)
    merits = _merits(price, chunks)
    mask = np.asarray(price.everywhere)
    chosen = np.full((num_states, width), -1)
    alive = np.lexsort((merits.sum(axis=0), goal, state))
    for place in range(width):
        if not len(alive):
            break
        if place == width - 1 and place:
            alive = alive[np.lexsort((goal[alive], price.held_bytes[alive], state[alive]))]
        groups, first = np.unique(state[alive], return_index=True)
        best = alive[first]
        chosen[groups, place] = best
        of = best[np.searchsorted(groups, state[alive])]
        dominated = (merits[:, of] <= merits[:, alive]).all(axis=0) & (mask[of] & mask[alive] == mask[alive])
        alive = alive[~dominated]
    empty = chosen < 0
    picked = cost.select(price, np.where(empty, 0, chosen))
    picked = Price(**{f.name: np.array(getattr(picked, f.name)) for f in fields(Price)})
    picked.first_s[empty] = np.inf
    index = np.where(empty, 0, chosen)
    return Front(picked, number[index], left[index], right[index], tuple(candidates.operator for candidates in sets))


def _merits(price: Price, chunks: int) -> NDArray[np.float64]:
    """Returns what candidates are compared by, less is better, as [merits, n]; what does not differ is left out."""
    first_out = np.where(price.barrier, price.first_s + (chunks - 1) * price.period_s + price.rest_s, price.first_s)
    out_period = np.where(price.barrier, price.last_s, price.period_s)
    seconds = (price.first_s, price.period_s, first_out, out_period, price.enter_s, price.late_s, price.leave_s)
    between = (price.wrap_s, price.weights_s)
    held = (price.held_bytes, price.peak_bytes, price.offloaded_bytes)
    rows = [*seconds, *between, *held, -np.asarray(price.narrowest)]
    differing = [row for row in rows if len(row) and np.ptp(row) > 0]
    return np.array(differing or [rows[0]])


def at(price: Price, rows: Ints, axis: int) -> Price:
    """Returns the candidates of the allocations `rows`, as [n, width, 1] (axis 1) or [n, 1, width] (axis 2)."""
    return Price(**{f.name: np.expand_dims(getattr(price, f.name)[rows], 3 - axis) for f in fields(Price)})
