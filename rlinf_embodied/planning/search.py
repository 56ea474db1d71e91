"""Searches plans: an anytime search by random moves over lists of items, priced by the simulation alone.

    1. start    everything on all devices, on one, and two groups of stages on any two parts of the cluster
    2. move     devices or blocks of some stages, the order, streaming and chunks, shards, who shares memory
    3. accept   a plan that is not slower; after many moves without a gain, continue from a changed good plan (a kick)

If stages do not fit into a device's memory together, some are made exclusive.  Large problems are searched in units of
identical devices and of blocks (coarse.py), and the best plans are then refined on the devices.  The search is
deterministic unless the time limit ends it, which it reports.  It keeps the best plan of every kind and structure.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlinf_embodied.planning.plan import (
    Devices,
    Item,
    Kind,
    Pairs,
    Place,
    Plan,
    in_order,
    sorted_pairs,
    whole,
    with_lent,
)
from rlinf_embodied.planning.pricing import Held, Pricer
from rlinf_embodied.planning.simulate import Simulator

Items = tuple[Item, ...]
Score = tuple[float, float]  # seconds, inf if the plan does not fit; bytes by which it does not
State = tuple[Items, Pairs]
PairSet = frozenset[tuple[str, str]]

MOVES = 110_000  # times stages and devices
MOST_MOVES, LEAST_MOVES = 12_000, 400
MOST_PAIRS = 40  # largest number of new exclusive pairs of which the unnecessary ones are dropped
_IMPOSSIBLE: Score = (math.inf, math.inf)


class Search:
    """Searches plans of one staleness; prices and the best plans are kept from run to run."""

    def __init__(self, pricer: Pricer, staleness: int = 0, seed: int = 0) -> None:
        self.pricer, self.work, self.cluster = pricer, pricer.workflow, pricer.cluster
        self.staleness, self.draw = staleness, random.Random(seed)
        self.kind: Kind | None = None  # the kind to which the search is restricted
        self.simulator = Simulator(pricer)
        self.stages, self.num_blocks = list(self.work.stages), self.work.num_blocks
        devices = range(self.cluster.num_devices)
        self.several = {n: s.devices_per_worker for n, s in self.work.stages.items() if s.devices_per_worker > 1}
        self.allowed = {s: tuple(d for d in devices if pricer.runs_on(s, d)) for s in self.stages}
        self.before = {s: set(self.work.sources(s)) for s in self.stages}
        self.chunks = [k for k in range(2, min(self.num_blocks, 64) + 1) if self.num_blocks % k == 0]
        self.scores: dict[State, Score] = {}
        self.best: dict[tuple[Kind, tuple], tuple[Score, Plan]] = {}
        self._separated: dict[tuple[frozenset[tuple[Held, float]], PairSet], PairSet] = {}
        self._busy: dict[Item, dict[int, float]] = {}
        self._streams: dict[tuple[str, ...], bool] = {}
        shards = 0.74 if self.work.loops else 0.0
        self._moves = (  # each up to this draw
            *((0.38, self._move_devices), (0.66, self._move_blocks), (shards, self._move_shards)),
            *((0.82, self._move_order), (1.0, self._move_chunks)),
        )

    # --------------------------------------------------------------------------------------------------------- price
    def score(self, state: State, limit: float = math.inf) -> Score:
        """Returns the price of a plan; for one slower than `limit` only a lower bound above it."""
        plan = Plan("", self.cluster.num_devices, state[0], state[1], self.staleness)
        if self.kind is not None and plan.kind(self.work) is not self.kind:
            return _IMPOSSIBLE
        if state in self.scores:
            return self.scores[state]
        memory = self.pricer.memory_bytes
        lacking = sum(max(0.0, needs - memory[device]) for device, needs in self.pricer.memory(plan).items())
        if lacking:
            score = (math.inf, lacking)
        elif (bound := max(self._total_s(state[0]).values()) * (1 - 1e-9)) > limit:
            return (bound, 0.0)
        else:
            score = (self.simulator.run(plan, limit_s=limit).iteration_s, 0.0)
            if score[0] > limit:
                return score
        self.scores[state] = score
        key = plan.kind(self.work), structure(plan)
        if key not in self.best or score < self.best[key][0]:
            self.best[key] = score, plan
        return score

    def _total_s(self, items: Items) -> dict[int, float]:
        total: dict[int, float] = {}
        for item in items:
            for device, seconds in self._busy_s(item).items():
                total[device] = total.get(device, 0.0) + seconds
        return total

    def _busy_s(self, item: Item) -> dict[int, float]:
        if item not in self._busy:
            busy_s: dict[int, float] = {}
            loop = self.work.loop_of(item.places[0].stage)
            for place, layout in self.pricer.layouts.of_item(item):
                if self.pricer.profile.stages[place.stage].finish_quantiles:  # it begins all its blocks at once
                    layout = self.pricer.layouts.of(place, 1, shards=loop is not None)
                times = loop.chunk_steps if loop else 1
                for device, seconds in zip(layout.devices, self.simulator.lengths(place.stage, layout), strict=True):
                    busy_s[device] = busy_s.get(device, 0.0) + times * seconds
            self._busy[item] = busy_s
        return self._busy[item]

    # --------------------------------------------------------------------------------------------------------- memory
    def resident(self, items: Items, exclusive: Pairs = (), shuffled: bool = False) -> State:
        """Returns the items with enough exclusive pairs of stages for the memory of all devices.

        First, all stages of different items on a full device become exclusive.  Then each unnecessary pair is dropped,
        those with the slowest switches first, or in random order if `shuffled`.
        """
        ahead = self.pricer.ahead_bytes(Plan("", self.cluster.num_devices, items, exclusive, self.staleness))
        room, pairs = self.pricer.memory_bytes, frozenset(exclusive)
        loads = frozenset((on, room[device] - ahead.get(device, 0.0)) for device, on in self.pricer.held(items).items())
        if self._fit(loads, pairs):
            return items, exclusive
        if shuffled or (loads, pairs) not in self._separated:
            self._separated[loads, pairs] = self._separate(loads, pairs, shuffled)
        return items, tuple(sorted(self._separated[loads, pairs]))

    def _fit(self, loads: Iterable[tuple[Held, float]], pairs: PairSet) -> bool:
        return all(self.pricer.peak(on, pairs) <= limit for on, limit in loads)

    def _separate(self, loads: Iterable[tuple[Held, float]], before: PairSet, shuffled: bool) -> PairSet:
        known, pairs = self.pricer.profile.stages, before
        for on, limit in loads:
            if self.pricer.peak(on, pairs) > limit:
                stages = [[stage for stage, _ in entries if not known[stage].stays] for entries in on]
                choices = (pair for a, b in itertools.combinations(stages, 2) for pair in itertools.product(a, b))
                pairs = pairs.union(sorted_pairs(choices))
        switch_s = {name: stage.offload_s + stage.onload_s for name, stage in known.items()}
        new = sorted(pairs - before, key=lambda pair: (-switch_s[pair[0]] - switch_s[pair[1]], pair))
        if shuffled:
            self.draw.shuffle(new)
        for pair in new if len(new) <= MOST_PAIRS else ():
            if self._fit(loads, pairs - {pair}):
                pairs -= {pair}
        return pairs

    # --------------------------------------------------------------------------------------------------------- starts
    def starts(self) -> Iterator[State]:
        everywhere = tuple(range(self.cluster.num_devices))
        number = len(everywhere)
        yield self._start(dict.fromkeys(self.stages, everywhere))
        yield self._start(dict.fromkeys(self.stages, everywhere[:1]))
        yield self._start(dict.fromkeys(self.stages, everywhere), shards=2)
        units = [item.stages for item in in_order(self.work, {s: Place(s, ()) for s in self.stages})]
        sizes = sorted({max(1, round(number * share)) for share in (0.125, 0.25, 0.5, 0.75, 0.875)} - {number})
        positions = range(1, len(units)) if len(units) < 12 else range(1, len(units), len(units) // 6)
        for size in sizes:
            first, second = everywhere[:size], everywhere[size:]
            for loop in self.work.loops.values():
                sides = {loop.opener: first, loop.answerer: second}
                for rest in (everywhere, first, second):
                    yield self._start(dict.fromkeys(self.stages, rest) | sides, shards=2)
            for at in positions:
                front = [stage for unit in units[:at] for stage in unit]
                places = dict.fromkeys(self.stages, second) | dict.fromkeys(front, first)
                yield self._start(places)
                for chunks in self.chunks[-2:]:
                    yield self._start(places, chunks=chunks)

    def _start(self, devices: Mapping[str, Devices], shards: int = 1, chunks: int = 1) -> State:
        places = {s: self._fitting(Place(s, devices[s])) for s in self.stages}
        items = in_order(self.work, places, shards)
        return self.resident(self._streaming(items, 0, len(items), chunks) or items)

    def _fitting(self, place: Place, size: int = 0) -> Place:
        """Returns the place without devices that cannot run its stage or would get no blocks."""
        allowed = [d for d in place.devices if d in self.allowed[place.stage]]
        if each := self.several.get(place.stage):
            allowed = with_lent(whole(allowed, each), each)
        most = self.work.most_devices(place.stage, size or self.num_blocks)
        return replace(place, devices=tuple((allowed or self.allowed[place.stage])[:most]), blocks=())

    def _streaming(self, items: Items, first: int, last: int, chunks: int) -> Items | None:
        """Returns the items with the first streamable run of items within a range merged into one item of `chunks`."""
        if chunks == 1:
            return None
        run: list[Item] = []
        for at in range(first, last):
            stages = tuple(s for item in (*run, items[at]) for s in item.stages)
            if self._may_stream(stages):
                run.append(items[at])
            elif len(run) > 1:
                break
            else:
                run, first = [items[at]] if self._may_stream(items[at].stages) else [], at
                first += not run
        if len(run) < 2:
            return None
        places = tuple(self._chunked(place, chunks) for item in run for place in item.places)
        return (*items[:first], Item(places, chunks), *items[first + len(run) :])

    def _may_stream(self, stages: tuple[str, ...]) -> bool:
        if stages not in self._streams:
            whole = any(self.work.loop_of(stage) or self.work.stages[stage].whole for stage in stages)
            self._streams[stages] = not whole and not self.work.blocking(stages)
        return self._streams[stages]

    def _chunked(self, place: Place, chunks: int) -> Place:
        """Returns the place if it suits the chunks; otherwise one with fewer devices, or with even blocks."""
        if self._suits(place, chunks):
            return place
        return self._fitting(place, self.num_blocks // chunks)

    def _suits(self, place: Place, chunks: int) -> bool:
        unit = self._unit(place.stage, chunks)
        most = self.work.most_devices(place.stage, self.num_blocks // chunks)
        return len(place.devices) <= most and not any(blocks % unit for blocks in place.blocks)

    def _unit(self, stage: str, chunks: int) -> int:
        batch = self.work.stages[stage].blocks_per_batch
        return batch if batch > 1 else chunks

    # ---------------------------------------------------------------------------------------------------------- moves
    def moved(self, state: State) -> State | None:
        """Returns a neighbour of a plan, or None if the drawn move is impossible."""
        items, pairs = state
        kind = self.draw.random()
        if kind >= 0.92 and pairs:
            return self.resident(items, shuffled=True)
        new = next(move for limit, move in self._moves if kind < limit)(items)
        # with the exclusive pairs that they need, in addition to the present ones or from scratch
        return None if new is None else self.resident(new, pairs if self.draw.random() < 0.6 else ())

    def _some(self, items: Items) -> list[Place]:
        places = [place for item in items for place in item.places]
        chosen = self.draw.choice(places)
        way = self.draw.random()
        if way < 0.55:
            return [chosen]
        if way < 0.75:
            loop = self.work.loop_of(chosen.stage)
            return [place for place in places if loop and place.stage in loop.sides] or [chosen]
        alike = [place for place in places if place.devices == chosen.devices]
        return alike if way < 0.85 else self.draw.sample(alike, self.draw.randint(1, len(alike)))

    def _replaced(self, items: Items, places: Sequence[Place]) -> Items | None:
        new = {place.stage: place for place in places}
        replaced = []
        for item in items:
            changed = tuple(new.get(place.stage, place) for place in item.places)
            if changed != item.places:
                size = self.num_blocks // item.chunks
                changed = tuple(self._fitting(p, size) if p.stage in self.several else p for p in changed)
                if not all(p.devices and self._suits(p, item.chunks) for p in changed):
                    return None
                item = replace(item, places=changed)
            replaced.append(item)
        return tuple(replaced)

    def _move_devices(self, items: Items) -> Items | None:
        some, way, draw = self._some(items), self.draw.random(), self.draw
        everywhere, present = set(range(self.cluster.num_devices)), set(some[0].devices)
        places = [place for item in items for place in item.places]
        donors: list[Place] = []  # the places that give a device to these stages
        if way < 0.25:
            new = present ^ {draw.randrange(len(everywhere))}
        elif way < 0.35:
            devices = draw.choice(places).devices
            moved = draw.choice(devices)
            rest = tuple(device for device in devices if device != moved)
            donors = [replace(place, devices=rest) for place in places if place.devices == devices]
            new = present | {moved}
        elif way < 0.5 and present != everywhere:
            new = present ^ {draw.choice(sorted(present)), draw.choice(sorted(everywhere - present))}
        elif way < 0.75:
            other = draw.choice(places)
            new = set(other.devices) if draw.random() < 0.5 else everywhere - set(other.devices)
        elif way < 0.85:
            new = everywhere
        else:
            new = set(draw.sample(sorted(everywhere), draw.randint(1, len(everywhere))))
        chosen = [replace(place, blocks=()) for place in donors]
        for place in some:
            devices = tuple(sorted(new & set(self.allowed[place.stage])))
            most = self.work.most_devices(place.stage)
            chosen.append(
                Place(place.stage, devices if len(devices) <= most else tuple(sorted(draw.sample(devices, most))))
            )
        return self._replaced(items, chosen)

    def _move_blocks(self, items: Items) -> Items | None:
        """Moves blocks between two devices, often from the busiest to the least busy one."""
        draw = self.draw
        some = [p for p in self._some(items) if len(p.devices) > 1 and p.stage not in self.several]
        if not some:
            return None
        same = [place for place in some if place.devices == some[0].devices]
        chunks = {stage: item.chunks for item in items for stage in item.stages}
        units = {place.stage: self._unit(place.stage, chunks[place.stage]) for place in same}
        even = {stage: self._even(len(some[0].devices), unit) for stage, unit in units.items()}
        now, unit, total = list(some[0].blocks) or even[some[0].stage][:], max(units.values()), self._total_s(items)
        load = [total.get(device, 0.0) for device in some[0].devices]
        for _ in range(draw.choice((1, 1, 2, 3))):
            a, b = draw.sample(range(len(now)), 2)
            if draw.random() < 0.5:
                a, b = max(range(len(now)), key=load.__getitem__), min(range(len(now)), key=load.__getitem__)
            most = (now[a] - 1) // unit
            if a == b or most < 1:
                continue
            number = unit * min(most, draw.choice((1, 1, 1, 2, 4)) if draw.random() < 0.8 else draw.randint(1, most))
            for device, change in ((a, -number), (b, number)):
                load[device] *= (now[device] + change) / now[device]
                now[device] += change
        if draw.random() < 0.1:
            now = even[some[0].stage]
        blocks = {stage: () if now == shares else tuple(now) for stage, shares in even.items()}
        return self._replaced(items, [replace(place, blocks=blocks[place.stage]) for place in same])

    def _even(self, number: int, unit: int) -> list[int]:
        units = self.num_blocks // unit
        return [unit * (-(-(i + 1) * units // number) - -(-i * units // number)) for i in range(number)]

    def _move_shards(self, items: Items) -> Items | None:
        loop = self.draw.choice(list(self.work.loops.values()))
        shards = self.draw.choice(loop.shards)
        changed = tuple(replace(item, shards=shards) if loop.opener in item.stages else item for item in items)
        return changed if shards <= self.num_blocks and changed != items else None

    def _move_order(self, items: Items) -> Items | None:
        if len(items) < 2:
            return None
        at = self.draw.randrange(len(items) - 1)
        first, second = items[at], items[at + 1]
        if any(self.before[stage] & set(first.stages) for stage in second.stages):
            return None
        return (*items[:at], second, first, *items[at + 2 :])

    def _move_chunks(self, items: Items) -> Items | None:
        """Splits a streaming item, changes its chunks, or merges neighbouring items into a streaming one."""
        draw = self.draw
        if not self.chunks:
            return None
        at = draw.randrange(len(items))
        item, way = items[at], draw.random()
        if item.chunks > 1 and way < 0.5:
            chunks = draw.choice(self.chunks)
            if not self._may_stream(item.stages):
                return None
            changed = Item(tuple(self._chunked(place, chunks) for place in item.places), chunks)
            return (*items[:at], changed, *items[at + 1 :])
        if item.chunks > 1:
            cut = draw.choice((0, len(item.places) - 1, draw.randrange(len(item.places))))
            parts = item.places[: cut + 1], item.places[cut + 1 :]
            if draw.random() < 0.4:
                parts = tuple((place,) for place in item.places)
            split = [Item(part, item.chunks if len(part) > 1 else 1) for part in parts if part]
            return (*items[:at], *split, *items[at + 1 :])
        last = min(len(items), at + draw.choice((2, 2, 3, 4)))
        parts = [place for neighbour in items[at:last] for place in neighbour.places]
        chunks = max((neighbour.chunks for neighbour in items[at:last]), default=1)
        chunks = draw.choice(self.chunks) if chunks == 1 else chunks
        if len(parts) < 2 or not self._may_stream(tuple(place.stage for place in parts)):
            return None
        return (*items[:at], Item(tuple(self._chunked(place, chunks) for place in parts), chunks), *items[last:])

    # ------------------------------------------------------------------------------------------------------------ run
    def run(
        self, until: float = math.inf, kind: Kind | None = None, budget: float = 1.0, starts: Sequence[State] = ()
    ) -> bool:
        """Searches for a number of moves, or until a time (of time.monotonic()); returns whether the time ended it.

        With a `kind` the search is restricted to plans of it, starting from the best ones so far.  `budget` is the
        fraction of the moves; given `starts`, there is no minimum number of them.
        """
        self.kind = kind
        more = [(plan.items, plan.exclusive) for (k, _), (_, plan) in self.best.items() if k is kind]
        pool: list[tuple[Score, State]] = []
        for state in (*more[:4], *(starts or self.starts())):
            pool.append((self.score(state), state))
            if time.monotonic() > until and pool[0][0][0] < math.inf:
                return True
        pool = sorted({state: (score, state) for score, state in pool}.values(), key=lambda entry: entry[0])[:12]
        most = MOVES / (len(self.stages) * self.cluster.num_devices)
        most = round(budget * min(MOST_MOVES, max(0 if starts else LEAST_MOVES, most)))
        patience = 30 + 15 * len(self.stages)
        current = best = pool[0]
        idle = 0
        for _ in range(most):
            if time.monotonic() > until:
                return True
            new = current[1]
            for _ in range(1 if self.draw.random() < 0.6 else self.draw.choice((2, 2, 3))):
                new = self.moved(new) or new
            idle += 1
            if new != current[1]:
                score = self.score(new, current[0][0])
                if score <= current[0]:
                    idle = 0 if score < current[0] else idle
                    current = score, new
                    best = min(best, current, key=lambda entry: entry[0])
            if idle > patience:
                idle = 0
                state = (best if self.draw.random() < 0.6 else self.draw.choice(pool))[1]
                for _ in range(self.draw.randint(1, 4)):
                    state = self.moved(state) or state
                current = self.score(state), state
        return False


def structure(plan: Plan) -> tuple:
    """Returns a key that is equal for plans which differ only in devices and numbers."""
    alike = [item.places[0].devices == item.places[-1].devices for item in plan.items]
    items = tuple((item.stages, item.chunks > 1, same) for item, same in zip(plan.items, alike, strict=True))
    return items, bool(plan.exclusive), plan.staleness
