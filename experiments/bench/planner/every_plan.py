"""The best plan of a small case by trying every plan; knows nothing of how the planner searches.

What the executor does is set by the order of the stages, by which of them work chunk by chunk beside each other, by the
devices of each stage, the shards of a loop, and by who leaves the memory for whom.  So this is what is gone through:

    orders      every order of the units (a stage, or a loop) along the edges
    forms       every way to put neighbours of an order side by side in chunks, with every number of chunks; those that
                share a place within take turns, chunk by chunk or one after the other
    devices     every non-empty set for every stage and side of a loop (alike devices once): parts, overlaps, idle ones
    shares      if asked for, every way to divide the blocks of a stage among its devices
    switches    every way to take turns that switch, where what is resident does not fit together

A plan is simulated if its devices' work, and the chains of its stages, do not already take as long as the best one.
With a staleness only the former bounds it: what comes before and behind overlaps from iteration to iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.plan import Devices, Leaf, LoopNode, Node, Plan, Spatial, Temporal
from rlinf_embodied.planning.plan_check import require_runnable
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import Simulator
from rlinf_embodied.planning.tree import Shares

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbours of an order that work side by side in chunks; each part is a stage, or some that take turns."""

    chunks: int
    parts: tuple[tuple[str, ...], ...]
    resident: bool = True  # its turns


Form = tuple["str | Group", ...]


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan that was found, how many were simulated, and whether none was left out."""

    seconds: float
    tree: Node | None
    num_simulated: int
    complete: bool


@dataclass(frozen=True, slots=True)
class _Table:
    """A stage in so many chunks (or shards), by place: a set of devices, with the shares of each."""

    busy_s: Floats  # [places, devices]: of all calls
    least_s: Floats  # [places]: of the shortest call, or of a loop's side with one shard's calls
    on: NDArray[np.bool_]  # [places, devices]


class EveryPlan:
    """All plans of one case."""

    def __init__(
        self, pricer: Pricer, most_simulated: int = 4000, *, staleness: int = 0, with_shares: bool = False
    ) -> None:
        """Takes the case, after how many simulations to give up, the staleness, and whether shares may be uneven."""
        self.pricer, self.work, self.most = pricer, pricer.workflow, most_simulated
        self.staleness, self.with_shares = staleness, with_shares
        self.simulator = Simulator(pricer)
        self.num_devices = pricer.cluster.num_devices
        self.stages = tuple(self.work.stages)
        self.loops = {loop.opener: loop for loop in self.work.loops.values()}
        self.behind = {side: loop for loop in self.work.loops.values() for side in loop.sides[1:]}
        blocks = self.work.num_blocks
        self.chunks = [k for k in range(1, blocks + 1) if blocks % k == 0]
        self.places = self._places()
        self.masks = np.array([sum(1 << d for d in devices) for devices, _ in self.places])
        self.tables = {key: self._table(*key) for key in self._keys()}
        self.on = next(iter(self.tables.values())).on
        self._memory = [pricer.cluster.place_of(d).group.memory_bytes for d in range(self.num_devices)]

    def best(self, known_s: float = np.inf, margin: float = 1e-3) -> Best:
        """Returns the best plan; only those are looked for that are faster than `known_s` by more than a margin."""
        found, count = Best(np.inf, None, 0, True), 0
        sets = self._assignments()
        bound = known_s * (1 - margin)
        easiest = {s: _least([t for (name, _), t in self.tables.items() if name == s]) for s in self.stages}
        for order in self._orders():
            plain = dict.fromkeys(self.stages, 1)
            hopeful = sets[self._bound(order, (), easiest, sets) < bound]
            for form, shards in itertools.product(self._forms(order), self._shard_counts()):
                numbers = plain | {s: i.chunks for i in form if isinstance(i, Group) for part in i.parts for s in part}
                numbers |= dict.fromkeys((*self.loops, *self.behind), shards)
                chosen = {s: self.tables[s, numbers[s]] for s in self.stages}
                fits = hopeful[self._apart(form, hopeful)]
                least = self._bound(order, form, chosen, fits)
                for place in np.argsort(least, kind="stable"):
                    if least[place] >= bound:
                        break
                    for tree in self._trees(form, shards, fits[place]):
                        if count >= self.most:
                            return Best(found.seconds, found.tree, count, False)
                        count += 1
                        seconds = self.simulator.run(tree, staleness=self.staleness).iteration_s
                        if seconds < bound:
                            bound, found = seconds * (1 - margin), Best(seconds, tree, count, True)
        return Best(found.seconds, found.tree, count, True)

    # --------------------------------------------------------------------------------------------------- what there is
    def _orders(self) -> Iterator[tuple[str, ...]]:
        """Yields every order of the units along the edges; a loop bears its opener's name."""
        unit = {s: self.behind[s].opener if s in self.behind else s for s in self.stages}
        before = {(unit[e.source], unit[e.target]) for e in self.work.edges if unit[e.source] != unit[e.target]}
        for order in itertools.permutations(dict.fromkeys(unit.values())):
            place = {u: i for i, u in enumerate(order)}
            if all(place[a] < place[b] for a, b in before):
                yield order

    def _forms(self, order: tuple[str, ...]) -> Iterator[Form]:
        if not order:
            yield ()
            return
        for rest in self._forms(order[1:]):
            yield (order[0], *rest)
        for size in range(2, len(order) + 1):
            group, chunks = order[:size], self.chunks[1:]
            if any(unit in self.loops for unit in group):
                break
            for parts, k in itertools.product(_parted(group), chunks):
                if self._streams(parts, k):
                    turns = any(len(part) > 1 for part in parts)
                    for rest, resident in itertools.product(self._forms(order[size:]), (True, False)[: 1 + turns]):
                        yield (Group(k, parts, resident), *rest)

    def _streams(self, parts: tuple[tuple[str, ...], ...], chunks: int) -> bool:
        size, work = self.work.num_blocks // chunks, self.work
        if not all(work.stages[s].accepts(size, work.num_blocks) for part in parts for s in part):
            return False
        return not any(work.blocking(a, b, size) for a, b in itertools.combinations(parts, 2))

    def _shard_counts(self) -> Sequence[int]:
        return next(iter(self.work.loops.values())).shards if self.work.loops else (1,)

    def _places(self) -> list[tuple[Devices, Shares]]:
        """Returns the sets of devices by bit mask (0: none), then those with uneven shares."""
        every = [tuple(d for d in range(self.num_devices) if mask >> d & 1) for mask in range(1 << self.num_devices)]
        found: list[tuple[Devices, Shares]] = [(devices, ()) for devices in every]
        for devices in (some for some in every if self.with_shares and len(some) > 1):
            for ends in itertools.combinations(range(1, self.work.num_blocks), len(devices) - 1):
                shares = tuple(b - a for a, b in itertools.pairwise((0, *ends, self.work.num_blocks)))
                found.append((devices, shares))
        return found

    def _assignments(self) -> Ints:
        """Returns all places of all stages, [n, stages]; those that differ by alike devices only once.

        With shares, devices are taken for unlike ones.
        """
        if self.with_shares:
            grid = np.meshgrid(*(np.arange(1, len(self.places)) for _ in self.stages), indexing="ij")
            return np.stack([column.ravel() for column in grid], axis=1)
        everything = np.arange(1 << len(self.stages))
        columns: list[Ints] = [np.zeros((1, 0), dtype=np.int64)]
        for alike in self._alike():
            rows = np.array(list(itertools.combinations_with_replacement(everything, alike)), dtype=np.int64)
            columns.append(rows[:, ::-1])
        joined = columns[0]
        for more in columns[1:]:
            joined = np.concatenate([np.repeat(joined, len(more), 0), np.tile(more, (len(joined), 1))], 1)
        hosts = joined[:, None, :] >> np.arange(len(self.stages))[None, :, None] & 1
        sets = (hosts << np.arange(self.num_devices)).sum(axis=2)
        return sets[(sets > 0).all(axis=1)]

    def _alike(self) -> list[int]:
        """Returns sizes of runs of devices that can be exchanged: those of a node (several nodes: each for itself)."""
        return [g.devices_per_node for g in self.pricer.classes for _ in range(g.num_nodes)]

    # ---------------------------------------------------------------------------------------------------------- bounds
    def _keys(self) -> Iterator[tuple[str, int]]:
        for stage, spec in self.work.stages.items():
            if stage in self.loops or stage in self.behind:
                yield from ((stage, shards) for shards in self._shard_counts())
            else:
                sizes = ((k, self.work.num_blocks // k) for k in self.chunks)
                yield from ((stage, k) for k, size in sizes if k == 1 or spec.accepts(size, self.work.num_blocks))

    def _table(self, stage: str, parts: int) -> _Table:
        n, inside = self.num_devices, stage in self.loops or stage in self.behind
        on = (self.masks[:, None] >> np.arange(n) & 1).astype(bool)
        busy, least = np.zeros((len(self.places), n)), np.zeros(len(self.places))
        turns, rounds = 1.0, 1.0
        if inside:
            loop = self.loops.get(stage) or self.behind[stage]
            fraction = self.pricer.profile.stages[stage].bootstrap_fraction if stage == loop.answerer else 0.0
            turns, rounds = loop.num_calls(stage) + fraction, loop.expected_rounds
        streams = parts > 1 and not inside and bool(self.pricer.profile.stages[stage].finish_quantiles)
        for place, (devices, shares) in enumerate(self.places):
            if not devices:
                continue
            few = inside and parts > self.work.num_blocks
            if few or (not inside and any(share % parts for share in shares)):
                busy[place], least[place] = np.inf, np.inf
                continue
            layout = self.simulator.layout(Leaf(stage, devices, shares), parts, shards=inside)
            calls = list(zip(layout.sizes, layout.devices, strict=True))
            if streams:
                owned = {d: sum(size for size, of in calls if of == d) for d in layout.hosts}
                whole = {d: self.simulator.seconds(stage, size, len(owned), d) for d, size in owned.items()}
                lengths = [whole[d] * size / owned[d] for size, d in calls]
                shortest = 0.0
            else:
                lengths = [self.simulator.seconds(stage, size, len(layout.hosts), d) for size, d in calls]
                shortest = min(lengths)
            for length, (_, device) in zip(lengths, calls, strict=True):
                busy[place, device] += length * turns * rounds
            least[place] = shortest * turns * rounds
        return _Table(busy, least, on)

    def _bound(self, order: tuple[str, ...], form: Form, tables: dict[str, _Table], sets: Ints) -> Floats:
        """Returns seconds that no plan with these places undercuts, [n]."""
        if self.staleness:
            busy = [tables[stage].busy_s[sets[:, number]] for number, stage in enumerate(self.stages)]
            return np.sum(busy, axis=0).max(axis=1)
        group_of = {s: i for i, item in enumerate(form) if isinstance(item, Group) for part in item.parts for s in part}
        done = np.zeros((len(sets), self.num_devices))  # of each device, at the earliest
        begun: dict[int, NDArray[np.bool_]] = {}  # devices that have begun with a group's stages
        first: dict[str, Floats] = {}  # when the first block of a stage may be there
        last: dict[str, Floats] = {}
        for unit in order:
            sides = (*self.loops[unit].sides[1:], unit) if unit in self.loops else (unit,)
            sources = [s for side in sides for s in self.work.sources(side) if s not in sides]
            none = np.zeros(len(sets))
            ready = np.max([none, *(first[s] for s in sources)], axis=0)
            waited = np.max([none, *(last[s] for s in sources)], axis=0)
            where = [sets[:, self.stages.index(side)] for side in sides]
            on = np.any([tables[s].on[w] for s, w in zip(sides, where, strict=True)], axis=0)
            busy = np.sum([tables[s].busy_s[w] for s, w in zip(sides, where, strict=True)], axis=0)
            least = np.sum([tables[s].least_s[w] for s, w in zip(sides, where, strict=True)], axis=0)
            group = group_of.get(unit)
            if unit in self.loops:  # its sides begin with each other and hand on at the end
                start = np.maximum(np.where(on, done, np.inf).min(axis=1), ready)
                done = np.where(on, np.maximum(done, ready[:, None]) + busy, done)
                end = np.maximum(start + least, np.where(on, done, 0.0).max(axis=1))
                for side in sides:
                    first[side], last[side] = start + least, np.maximum(end, waited + least)
                continue
            fresh = on if group is None else on & np.logical_not(begun.get(group, np.zeros_like(on)))
            if group is None:
                done = np.where(on, np.maximum(done, ready[:, None]) + busy, done)
                first[unit] = np.where(on & (busy > 0), done, np.inf).min(axis=1)
                first[unit] = np.where((busy > 0).any(axis=1), np.maximum(first[unit], ready + least), ready)
                ends = np.where(on, done, 0.0).max(axis=1)
                last[unit] = np.maximum(ends, waited + least)
            else:
                done = np.where(fresh, np.maximum(done, ready[:, None]), done) + np.where(on, busy, 0.0)
                begun[group] = begun.get(group, np.zeros_like(on)) | on
                first[unit] = ready + least
                last[unit] = np.maximum(waited + least, ready + np.where(on, busy, 0.0).max(axis=1))
        return np.max([done.max(axis=1), *last.values()], axis=0)

    def _apart(self, form: Form, sets: Ints) -> NDArray[np.bool_]:
        """Returns which assignments give the parts of each group devices of their own."""
        keep = np.ones(len(sets), dtype=bool)
        for group in (item for item in form if isinstance(item, Group)):
            used = np.zeros(len(sets), dtype=np.int64)
            for part in group.parts:
                own = np.bitwise_or.reduce([self.masks[sets[:, self.stages.index(stage)]] for stage in part])
                keep &= used & own == 0
                used |= own
        return keep

    # ----------------------------------------------------------------------------------------------------------- trees
    def _trees(self, form: Form, shards: int, sets: Ints) -> Iterator[Node]:
        """Yields the plans of a form that fit into memory: without switches if that fits, else with some."""
        items = [self._node(item, shards, sets) for item in form]
        plain = items[0] if len(items) == 1 else Temporal(tuple(items))
        if self._runs(plain):
            if self._fits(plain):
                yield plain
                return
            seen: set[object] = set()
            for tree in _turns(items):
                shown = self._exclusive(tree, sets)
                if shown and shown not in seen and self._fits(tree):
                    seen.add(shown)
                    yield tree

    def _node(self, item: str | Group, shards: int, sets: Ints) -> Node:
        if isinstance(item, Group):
            parts = [tuple(self._leaf(stage, sets) for stage in part) for part in item.parts]
            nodes = tuple(part[0] if len(part) == 1 else Temporal(part, item.resident) for part in parts)
            return Spatial(nodes, self.work.num_blocks // item.chunks)
        if item in self.loops:
            loop = self.loops[item]
            sides = tuple(self._leaf(stage, sets) for stage in loop.sides)
            return LoopNode(loop.name, sides, shards)
        return self._leaf(item, sets)

    def _leaf(self, stage: str, sets: Ints) -> Leaf:
        return Leaf(stage, *self.places[int(sets[self.stages.index(stage)])])

    def _runs(self, tree: Node) -> bool:
        try:
            require_runnable("tried", tree, self.work)
        except PlanError:
            return False
        return True

    def _fits(self, tree: Node) -> bool:
        return all(
            needed <= self._memory[device] for device, needed in self.pricer.memory(tree, self.staleness).items()
        )

    def _exclusive(self, tree: Node, sets: Ints) -> frozenset[tuple[str, str]]:
        """Returns the pairs on some device together that leave it for each other."""
        place = {stage: int(self.masks[sets[i]]) for i, stage in enumerate(self.stages)}
        pairs = Plan("", self.num_devices, tree).exclusive().items()
        return frozenset((a, b) for a, others in pairs for b in others if place[a] & place[b])


def _least(tables: Sequence[_Table]) -> _Table:
    """Returns for each set the least that any number of chunks takes."""
    busy = np.min([table.busy_s for table in tables], axis=0)
    return _Table(busy, np.min([table.least_s for table in tables], axis=0), tables[0].on)


def _parted(group: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields every division of a group in two or more parts of neighbours."""
    for cuts in itertools.product((False, True), repeat=len(group) - 1):
        if any(cuts):
            ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(group)]
            yield tuple(group[a:b] for a, b in itertools.pairwise(ends))


def _turns(items: Sequence[Node]) -> Iterator[Node]:
    """Yields every nesting of turns, resident or switching, over items in their order."""
    if len(items) == 1:
        yield items[0]
    for at in range(1, len(items)):
        for first, second in itertools.product(list(_turns(items[:at])), list(_turns(items[at:]))):
            for resident in (True, False):
                yield Temporal((first, second), resident)
