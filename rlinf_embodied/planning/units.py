"""Sets of a workflow's units, as bit masks of stages: which may go first, and which a search must know."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.workflow.graph import Loop

Loops = tuple[Loop, ...]  # one, or several that share a stage


def find_units(pricer: Pricer) -> dict[int, str | Loops]:
    """Returns bit mask -> stage name or loops, in the order of the data edges.

    A loop counts as one unit, and so do those that share a stage.
    """
    loops = {stage: (loop,) for loop in pricer.workflow.loops.values() for stage in loop.sides}
    units: dict[int, str | Loops] = {}
    for stage in pricer.workflow.order():
        if stage in loops:
            units[pricer.mask_of(loops[stage])] = loops[stage]
        else:
            units[pricer.bits[stage]] = stage
    return units


def find_predecessors(units: Iterable[int], pricer: Pricer) -> dict[int, int]:
    """Returns, for each unit, the units that must go before it."""
    return {u: sum(v for v in units if v != u and pricer.cut(v, u).dependent) for u in units}


def intervals(units: Mapping[int, object], before: dict[int, int]) -> list[int]:
    """Returns all differences of two predecessor-closed sets of units, as masks, the small ones first."""
    closed = {0}
    for _ in units:
        closed |= {c | u for c in closed for u in units if not c & u and before[u] & c == before[u]}
    found = {b & ~a for a in closed for b in closed if a != b and a & b == a}
    return sorted(found, key=lambda mask: (sum(1 for u in units if u & mask), mask))


def cuts(mask: int, units: Sequence[int], before: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yields every division of a set of units in a part that may go first and the rest."""
    inside = [u for u in units if u & mask]
    for size in range(1, len(inside)):
        for chosen in itertools.combinations(inside, size):
            first = sum(chosen)
            if all(before[u] & mask & ~first == 0 for u in chosen):
                yield first, mask & ~first
