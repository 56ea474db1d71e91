"""Finds plan trees on whole regions of a cluster by the formulas of cost.py: steps 1 to 5 of planner.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

import numpy as np

from rlinf_embodied.planning import cost
from rlinf_embodied.planning.allocations import make_allocations
from rlinf_embodied.planning.draft import Allocation, Draft
from rlinf_embodied.planning.frontier import Candidates, Front, Ints, Operator, at, fitting, flatten, prune
from rlinf_embodied.planning.improve import Drafted, improved, priced, priced_ahead
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.units import cuts, find_predecessors, find_units, intervals

SMALL_WIDTH = 8  # candidates kept per set and allocation: in 120 random cases nothing was lost, with 4 up to 7 %
LARGE_WIDTH = 4  # on larger clusters
NUM_RANKED = 12  # plans of different shape that are returned
NUM_IMPROVED = 4  # of them, those whose parts are fitted node by node


class Mode(StrEnum):
    """Which trees are searched."""

    any = "any"
    temporal = "temporal"  # all on all devices, by turns
    spatial = "spatial"  # every stage on devices of its own
    hybrid = "hybrid"  # the sides of a loop disaggregated (without loops: some parts), and turns on all devices


class Search:
    """Steps 1 to 5 for one workflow, profile and cluster."""

    def __init__(
        self,
        pricer: Pricer,
        mode: Mode = Mode.any,
        *,
        width: int = SMALL_WIDTH,
        ignore_memory: bool = False,
    ) -> None:
        """Prepares a search.

        Args:
            pricer: what is to be planned.
            mode: which trees are tried.
            width: candidates that are kept per set of units and allocation.
            ignore_memory: look for the plan that needs the least memory, whether or not there is as much.
        """
        self.pricer, self.mode, self.width, self.by_memory = pricer, mode, width, ignore_memory
        self.allocations = make_allocations(
            [group.num_devices for group in pricer.classes], [group.devices_per_node for group in pricer.classes]
        )
        self.capacity_bytes = np.inf if ignore_memory else pricer.capacity_bytes
        self.chunk_counts = pricer.chunk_counts() if mode in (Mode.any, Mode.spatial, Mode.hybrid) else (1,)
        self.units = find_units(pricer)
        self.before = find_predecessors(self.units, pricer)
        self.fronts: dict[tuple[int, int], Front] = {}
        self._last: list[Candidates] = []  # what was found for all units, before any of it is dropped

    # ---------------------------------------------------------------------------------------------------- steps 3 and 4
    def run(self) -> list[Drafted]:
        """Returns plans for the whole workflow on the whole cluster, the fastest first; empty if none fits."""
        everything = sum(self.units)
        for units in intervals(self.units, self.before):
            self._solve(units, is_root=units == everything)
        return self._read_off(everything)

    def _solve(self, mask: int, is_root: bool) -> None:
        """Finds the front of a set of units for every number of chunks; the unchunked one comes last."""
        collapsed: list[Candidates] = []
        for chunks in sorted(self.chunk_counts, reverse=True):
            sets = list(self._alone(mask, chunks)) if mask in self.units else list(self._combined(mask, chunks))
            if chunks > 1:
                collapsed += [
                    Candidates(
                        replace(b.operator, own_chunks=chunks), b.state, cost.collapse(b.price, chunks), b.left, b.right
                    )
                    for b in sets
                    if b.operator.kind == "spatial"
                ]
            else:
                sets += collapsed
            sets = [fitting(candidates, self.capacity_bytes, chunks) for candidates in sets]
            sets = [candidates for candidates in sets if len(candidates.state)]
            if is_root and chunks == 1:
                self._last = sets
            elif sets and not (is_root and chunks > 1):
                self.fronts[mask, chunks] = prune(
                    sets, len(self.allocations.counts), self.width, chunks, self.by_memory
                )

    def _alone(self, mask: int, chunks: int) -> Iterator[Candidates]:
        """Step 3: a unit on every allocation."""
        counts, none = self.allocations.counts, np.zeros(len(self.allocations.counts), dtype=np.int64)
        unit = self.units[mask]
        if isinstance(unit, str):
            for classes in _subsets(counts.shape[1]):
                used = counts * np.isin(np.arange(counts.shape[1]), classes)
                leaf = self.pricer.leaf(unit, used, chunks)
                present = (used[:, list(classes)] > 0).all(axis=1)
                same = (used == counts).all(axis=1)
                leaf = replace(
                    leaf,
                    first_s=np.where(present, leaf.first_s, np.inf),
                    everywhere=np.where(same, leaf.everywhere, 0),
                )
                yield Candidates(Operator("leaf", unit, classes=classes), np.arange(len(counts)), leaf, none, none)
            return
        if chunks > 1:  # a loop hands its blocks on when its episodes have ended
            return
        if self.mode in (Mode.any, Mode.temporal):
            for shards in unit[0].shards if self.pricer.overlap_in_worker else (1,):
                collocated = self.pricer.loop_collocated(unit, counts, shards)
                yield Candidates(
                    Operator("loop", unit[0].name, shards=shards), np.arange(len(counts)), collocated, none, none
                )
        if self.mode in (Mode.any, Mode.spatial, Mode.hybrid):
            first, second, total = self.allocations.first, self.allocations.second, self.allocations.total
            for shards in unit[0].shards:
                disaggregated = self.pricer.loop_disaggregated(unit, counts[first], counts[second], shards)
                yield Candidates(
                    Operator("loop", unit[0].name, shards=shards, masks=(1, 1)), total, disaggregated, first, second
                )

    def _combined(self, mask: int, chunks: int) -> Iterator[Candidates]:
        """Step 4: a set of units, cut in two in every way."""
        for first, second in cuts(mask, list(self.units), self.before):
            a, b = self.fronts.get((first, chunks)), self.fronts.get((second, chunks))
            if a is None or b is None:
                continue
            if self.mode is not Mode.spatial:
                yield from self._temporal(first, second, a, b, chunks)
            dependent = self.pricer.cut(first, second).dependent
            if self.mode is not Mode.temporal and (dependent or first < second):
                yield from self._spatial(first, second, a, b, chunks)

    def _temporal(self, first: int, second: int, a: Front, b: Front, chunks: int) -> Iterator[Candidates]:
        """Both parts on one allocation, for each allocation."""
        counts, n = self.allocations.counts, len(self.allocations.counts)
        rows, shape = np.arange(n), (n, a.width, b.width)
        left, right, state = _places(rows, rows, rows, a.width, b.width)
        cut, by_chunk = self.pricer.cut(first, second), self.pricer.by_chunk(first, second, chunks)
        sides = at(a.price, rows, 1), at(b.price, rows, 2)
        may_switch = not self.pricer.staying & (first | second)
        for resident in (True, False) if may_switch else (True,):
            joined = self.pricer.temporal(cut, *sides, chunks, counts[:, None, None], by_chunk, resident)
            if chunks == 1:
                joined = cost.collapse(joined, 1)
            operator = Operator("temporal", chunks=chunks, masks=(first, second), resident=resident)
            yield Candidates(operator, state, flatten(joined, shape), left, right)

    def _spatial(self, first: int, second: int, a: Front, b: Front, chunks: int) -> Iterator[Candidates]:
        """The two parts on two allocations, for every split of every allocation."""
        if not self.pricer.streams(first, second, chunks):
            return
        i, j, total = self.allocations.first, self.allocations.second, self.allocations.total
        left, right, state = _places(i, j, total, a.width, b.width)
        counts = self.allocations.counts
        joined = self.pricer.spatial(
            self.pricer.cut(first, second),
            *(at(a.price, i, 1), at(b.price, j, 2)),
            chunks,
            *(counts[i][:, None, None], counts[j][:, None, None]),
        )
        if chunks == 1:
            joined = cost.collapse(joined, 1)
        operator = Operator("spatial", chunks=chunks, masks=(first, second))
        yield Candidates(operator, state, flatten(joined, (len(i), a.width, b.width)), left, right)

    # ----------------------------------------------------------------------------------------------------------- step 5
    def _read_off(self, everything: int) -> list[Drafted]:
        """Returns the plans for the whole cluster, one per shape, the fastest (or smallest) first."""
        last = len(self.allocations.counts) - 1
        entries = []
        for candidates in self._last:
            here = np.flatnonzero(candidates.state == last)
            seconds = cost.iteration_s(candidates.price, 1)[here]
            goal = candidates.price.peak_bytes[here] if self.by_memory else seconds
            entries += [(goal[k], candidates, here[k]) for k in np.argsort(goal, kind="stable")[:24]]
        found: dict[str, Drafted] = {}
        whole = tuple(int(n) for n in self.allocations.counts[last])
        for _, candidates, entry in sorted(entries, key=lambda e: e[0]):
            if len(found) == NUM_RANKED:
                break
            draft = self._draft(candidates.operator, int(candidates.left[entry]), int(candidates.right[entry]), whole)
            if draft.shape() not in found and _is_of(draft, self.mode):
                plan = priced(draft, self.pricer)
                fit = len(found) < NUM_IMPROVED and not self.by_memory
                found[draft.shape()] = improved(plan, self.pricer) if fit else plan
        return sorted(found.values(), key=lambda plan: plan.peak_bytes if self.by_memory else plan.iteration_s)

    def apart(self) -> list[Drafted]:
        """Returns plans in which the front and the back of the workflow share no device, by the slower of the two.

        What `run` has found of either on a part of the cluster is what they are made of.
        """
        stale = self.pricer.workflow.back()
        back = sum(bit for stage, bit in self.pricer.bits.items() if stage in stale)
        front = sum(self.units) - back
        a, b = self.fronts.get((front, 1)), self.fronts.get((back, 1))
        if a is None or b is None:
            return []
        counts = self.allocations.counts
        whole = np.flatnonzero(self.allocations.total == len(counts) - 1)
        i, j = self.allocations.first[whole], self.allocations.second[whole]
        left, right, _ = _places(i, j, i, a.width, b.width)
        sides = at(a.price, i, 1), at(b.price, j, 2)
        seconds = np.maximum(*(cost.iteration_s(side) for side in sides)).ravel()
        found: dict[str, Drafted] = {}
        for k in np.argsort(seconds, kind="stable"):
            if len(found) == NUM_IMPROVED or not np.isfinite(seconds[k]):
                break
            sizes = [tuple(int(n) for n in counts[at[k // (a.width * b.width)]]) for at in (i, j)]
            parts = (self._candidate(a, int(left[k]), sizes[0]), self._candidate(b, int(right[k]), sizes[1]))
            draft = Draft("spatial", tuple(int(n) for n in counts[-1]), parts=parts)
            if draft.shape() not in found:
                plan = priced_ahead(draft, self.pricer)
                found[draft.shape()] = improved(plan, self.pricer, priced_ahead)
        return sorted(found.values(), key=lambda plan: plan.iteration_s)

    def _draft(self, operator: Operator, left: int, right: int, allocation: Allocation) -> Draft:
        """Returns the draft of a candidate on an allocation (that of its state, or a little more)."""
        if operator.kind == "leaf":
            return Draft("leaf", allocation, operator.name, classes=operator.classes)
        if operator.kind == "loop":
            if not operator.masks[0]:
                return Draft("loop", allocation, operator.name, shards=operator.shards)
            mine = tuple(int(n) for n in self.allocations.counts[left])
            return Draft(
                "loop", allocation, operator.name, shards=operator.shards, split=(mine, _rest(allocation, mine))
            )
        a, b = (self.fronts[mask, operator.chunks] for mask in operator.masks)
        allocations = (allocation, allocation)
        if operator.kind == "spatial":
            mine = tuple(int(n) for n in self.allocations.counts[left // a.width])
            allocations = (mine, _rest(allocation, mine))
        parts = tuple(self._candidate(f, k, own) for f, k, own in zip((a, b), (left, right), allocations, strict=True))
        return Draft(
            operator.kind,
            allocation,
            parts=_flat(operator, parts),
            chunks=operator.own_chunks,
            resident=operator.resident,
        )

    def _candidate(self, front: Front, index: int, allocation: Allocation) -> Draft:
        row, place = divmod(index, front.width)
        operator = front.operators[front.made_by[row, place]]
        return self._draft(operator, int(front.left[row, place]), int(front.right[row, place]), allocation)


# --------------------------------------------------------------------------------------------------------- small pieces
def _subsets(n: int) -> list[tuple[int, ...]]:
    return [s for size in range(1, n + 1) for s in itertools.combinations(range(n), size)]


def _places(i: Ints, j: Ints, total: Ints, a_width: int, b_width: int) -> tuple[Ints, Ints, Ints]:
    """Returns left place, right place and allocation of all pairs of candidates of allocations i and j."""
    shape = (len(i), a_width, b_width)
    left = np.broadcast_to((i[:, None] * a_width + np.arange(a_width))[:, :, None], shape)
    right = np.broadcast_to((j[:, None] * b_width + np.arange(b_width))[:, None, :], shape)
    return left.ravel(), right.ravel(), np.broadcast_to(total[:, None, None], shape).ravel()


def _rest(allocation: Allocation, mine: Allocation) -> Allocation:
    return tuple(a - b for a, b in zip(allocation, mine, strict=True))


def _flat(operator: Operator, parts: tuple[Draft, ...]) -> tuple[Draft, ...]:
    """Returns the parts with those of the same kind of node opened: a > (b > c) is a > b > c.

    Side by side, a || (b || c) is not (a || b) || c where c waits for a but not for b; only the latter is opened.
    """
    flat: list[Draft] = []
    for place, part in enumerate(parts):
        alike = part.kind == operator.kind and part.resident == operator.resident and part.chunks == 1
        flat += part.parts if alike and (part.kind == "temporal" or place == 0) else [part]
    return tuple(flat)


def _is_of(draft: Draft, mode: Mode) -> bool:
    """Returns whether a draft is of a mode: hybrid has devices that are shared, and parts that work side by side."""
    if mode is not Mode.hybrid:
        return True
    nodes = list(draft.walk())
    apart = any(node.kind == "spatial" or node.split for node in nodes)
    return draft.kind == "temporal" and apart
