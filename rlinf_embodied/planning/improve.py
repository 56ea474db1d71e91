"""Fits a found plan to a large cluster: single nodes, then devices, move between its parts as long as that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlinf_embodied.planning import cost
from rlinf_embodied.planning.allocations import MAX_ALLOCATIONS, is_small
from rlinf_embodied.planning.draft import Draft, is_possible, moves, price
from rlinf_embodied.planning.pricing import Pricer


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft with what the formulas say of it: an upper bound."""

    draft: Draft
    iteration_s: float
    peak_bytes: float


def priced(draft: Draft, pricer: Pricer) -> Drafted:
    """Returns a draft with its prediction."""
    known = price(draft, pricer)[0]
    return Drafted(draft, float(cost.iteration_s(known)[0]), float(known.peak_bytes[0]))


def priced_ahead(draft: Draft, pricer: Pricer) -> Drafted:
    """Returns a draft of two parts, the first of which runs ahead of the second: the slower one counts."""
    parts = [price(part, pricer)[0] for part in draft.parts]
    seconds, peaks = (
        [float(one[0]) for one in some]
        for some in zip(*((cost.iteration_s(p), p.peak_bytes) for p in parts), strict=True)
    )
    return Drafted(draft, max(seconds), max(peaks))


def improved(plan: Drafted, pricer: Pricer, priced: Callable[[Draft, Pricer], Drafted] = priced) -> Drafted:
    """Returns the plan after moving nodes, then halves of them, between its parts; as it is on a small cluster."""
    devices = sum(plan.draft.allocation)
    if is_small(devices):
        return plan
    largest = max(max(plan.draft.allocation) // MAX_ALLOCATIONS // 2, 1)
    steps = [largest >> k for k in range(largest.bit_length())]
    smallest = min(min(group.devices_per_node for group in pricer.classes), 8) if devices > 64 else 1
    for step in [s for s in steps if s >= smallest] or [smallest]:
        while (better := _one_move(plan, pricer, step, priced)) is not None:
            plan = better
    return plan


def _one_move(plan: Drafted, pricer: Pricer, step: int, priced: Callable[[Draft, Pricer], Drafted]) -> Drafted | None:
    """Returns the first plan that differs by `step` devices moved between two parts, fits, and is faster; or None."""
    tried = (d for i in range(len(pricer.classes)) for d in moves(plan.draft, step, i) if is_possible(d))
    for other in (priced(draft, pricer) for draft in tried):
        if other.iteration_s < plan.iteration_s * (1 - 1e-9) and other.peak_bytes <= pricer.capacity_bytes:
            return other
    return None
