"""Makes found plans better, one move at a time, by simulating what comes of it: the ranking is that of the simulation.

1. price    a sketch: the first of its trees that fits into memory, and those that switch where none does without
2. expand   the fastest sketch that has not been expanded: all that is one move away
3. drop     what cannot win: its busiest device alone takes as long as the WIDTH-th best so far, or it is far behind
4. kick     when the WIDTH best are expanded: one of them with several stages elsewhere at once, downhill from there
5. end      after KICKS of these without gain (UNLIKE times as many on unlike devices), or MOST_CALLS simulated calls
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_embodied.planning.moves import Moves
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.shares import all_alike
from rlinf_embodied.planning.simulate import Simulator
from rlinf_embodied.planning.sketch import Sketch, sketch_of, trees
from rlinf_embodied.planning.tree import Leaf, Node, Temporal, nodes

WIDTH = 6  # sketches that are expanded at least, each better than all the others
MOST_CALLS = 400_000  # that are simulated in all: some seconds
KICKS = 48
TRIED = 200  # changes of what does not fit into memory, in search of something that does
UNLIKE = 3  # times as many where devices are unlike, and their shares of the blocks may be, too
FAR = 1.15  # a sketch that takes so much longer than the best one is not expanded
_LEAST_GAIN = 1e-6


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan tree and what it takes."""

    tree: Node
    iteration_s: float
    peak_bytes: float  # on the fullest device


class Refiner:
    """Prices sketches and looks for better ones, for one workflow, profile and cluster."""

    def __init__(self, pricer: Pricer, simulator: Simulator, staleness: int = 0, uneven: bool = True) -> None:
        """Prepares a search.

        Args:
            pricer: what is planned.
            simulator: what prices it.
            staleness: how many iterations the fronts of all plans run ahead.
            uneven: whether devices that are unlike may have unlike shares of the blocks.
        """
        self.staleness = staleness
        self.pricer, self.simulator, self.work = pricer, simulator, pricer.workflow
        self.moves = Moves(self.work, pricer.cluster, pricer.slowdown_on if uneven else all_alike)
        self._memory = [pricer.cluster.place_of(d).group.memory_bytes for d in self.moves.everywhere]
        self._staying = {s for s, profile in pricer.profile.stages.items() if profile.stays}
        self._busy: dict[tuple[Leaf, int], dict[int, float]] = {}

    def best(self, seeds: Iterable[Node], most_calls: int = MOST_CALLS) -> list[Priced]:
        """Returns the seeds and what was found around them, the fastest first; none if none fits."""
        own: dict[Sketch, Priced | None] = {}
        for tree in seeds:
            sketch = sketch_of(tree, self.work)
            peak = self.fits(tree)
            priced = None if peak is None else self._priced(tree, peak)
            if sketch not in own or _seconds(priced) < _seconds(own[sketch]):
                own[sketch] = priced
        if most_calls and not any(own.values()):
            own |= self._that_fit(own)
        known = _Known()
        for sketch, priced in own.items():
            known.add(sketch, priced)
        for sketch in [self.moves.shares.by_speed(seed) for seed in own] if self.moves.shares.unlike else ():
            if most_calls and sketch not in known and self.moves.is_possible(sketch):
                known.add(sketch, self.price(sketch))
        self._expand(known, most_calls)
        draw, since = random.Random(0), 0
        kicks = KICKS * (UNLIKE if self.moves.shares.unlike else 1)
        while since < kicks and known.best(1) and self.simulator.num_calls < most_calls:
            before = known.seconds(known.best(1)[0])
            self._kick(known, draw, most_calls)
            gained = known.seconds(known.best(1)[0]) < before * (1 - _LEAST_GAIN)
            since = 0 if gained else since + 1
        return known.priced()

    def _that_fit(self, seeds: Iterable[Sketch]) -> dict[Sketch, Priced | None]:
        """Returns sketches with switches wherever they help, once one fits: the seeds, else changes of these at random.

        The formulas that draft seeds know neither every nesting of turns that switch nor what waits for stale rollouts.
        """
        draw, drafts, tried = random.Random(0), list(seeds), dict[Sketch, Priced | None]()
        changed = (self.moves.kicked(draw.choice(drafts), draw) for _ in range(TRIED if drafts else 0))
        for sketch in itertools.chain(drafts, changed):
            if sketch not in tried and self.moves.is_possible(sketch):
                tried[sketch] = self.price(sketch)
                if _seconds(tried[sketch]) < float("inf"):
                    break
        return tried

    def _kick(self, known: _Known, draw: random.Random, most_calls: int) -> None:
        """Goes downhill from a good sketch that was changed in several places at once."""
        at = self.moves.kicked(draw.choice(known.best(WIDTH)), draw)
        if at not in known:
            known.add(at, self.price(at) if self.moves.is_possible(at) else None)
        while (enough_s := known.seconds(at)) < float("inf") and self.simulator.num_calls < most_calls:
            around = list(self.moves.around(at))
            self._price_all(around, known, enough_s)
            best = min(around, key=known.seconds, default=at)
            if known.seconds(best) >= enough_s * (1 - _LEAST_GAIN):
                return
            at = best

    def _expand(self, known: _Known, most_calls: int) -> None:
        """Tries what is one move away from the best, until none of them has a better neighbour."""
        expanded: set[Sketch] = set()
        while self.simulator.num_calls < most_calls:
            ranked = known.best(WIDTH)
            far_s = FAR * known.seconds(ranked[0]) if ranked else 0.0
            fresh = [sketch for sketch in ranked if sketch not in expanded and known.seconds(sketch) <= far_s]
            if not fresh:
                break
            expanded.add(fresh[0])
            enough_s = known.seconds(ranked[-1]) if len(ranked) == WIDTH else far_s
            self._price_all(self.moves.around(fresh[0]), known, enough_s)

    def _price_all(self, sketches: Iterable[Sketch], known: _Known, enough_s: float) -> None:
        """Prices what is not known yet; nothing that surely takes as long as `enough_s`."""
        for sketch in sketches:
            if sketch not in known:
                known.add(sketch, self.price(sketch) if self.least_s(sketch) < enough_s else None)

    def price(self, sketch: Sketch) -> Priced | None:
        """Returns the fastest tree of a sketch that fits into memory: with switches only where nothing fits without."""
        best: Priced | None = None
        for number, tree in enumerate(trees(sketch, self.work)):
            peak = self.fits(tree)
            if peak is not None:
                found = self._priced(tree, peak)
                if found.iteration_s < _seconds(best):
                    best = found
                if number == 0:
                    break
            elif number == 0 and not self._could_fit(tree):
                break
        return best

    def _priced(self, tree: Node, peak_bytes: float) -> Priced:
        return Priced(tree, self.simulator.run(tree, staleness=self.staleness).iteration_s, peak_bytes)

    def fits(self, tree: Node) -> float | None:
        """Returns the bytes on the fullest device, None where they are too many or a stage would leave that cannot."""
        if any(isinstance(node, Temporal) and not node.resident for node in nodes(tree)):
            plan = Plan("", self.pricer.cluster.num_devices, tree)
            places = {stage: set(leaf.devices) for stage, leaf in plan.leaves().items()}
            for stage, others in plan.exclusive().items():
                if stage in self._staying and any(places[stage] & places[other] for other in others):
                    return None
        memory = self.pricer.memory(tree, self.staleness)
        fit = all(needed <= self._memory[device] for device, needed in memory.items())
        return max(memory.values()) if fit else None

    def _could_fit(self, tree: Node) -> bool:
        """Returns whether each device has room for any of its stages while all others are offloaded."""
        return all(needed <= self._memory[d] for d, needed in self.pricer.least_memory(tree).items())

    def least_s(self, sketch: Sketch) -> float:
        """Returns the seconds that the busiest device works: no plan is faster."""
        total: dict[int, float] = {}
        chunks = {stage: item.chunks for item in sketch.items for stage in item.units()}
        shards = {
            side: count
            for loop, count in zip(self.work.loops.values(), sketch.shards, strict=True)
            for side in loop.sides
        }
        for number, stage in enumerate(self.work.stages):
            leaf = Leaf(stage, sketch.devices[number], sketch.shares[number])
            for device, seconds in self._busy_s(leaf, 1 if stage in shards else chunks[stage]).items():
                total[device] = total.get(device, 0.0) + seconds
        return max(total.values())

    def _busy_s(self, leaf: Leaf, parts: int) -> dict[int, float]:
        """Returns how long a stage works on each device at least."""
        key = (leaf, parts)
        if key not in self._busy:
            self._busy[key] = self.simulator.busy_s(leaf, parts)
        return self._busy[key]


def _seconds(priced: Priced | None) -> float:
    return float("inf") if priced is None else priced.iteration_s


class _Known:
    """Sketches with what they cost, the fastest first; equally fast ones in the order in which they were found."""

    def __init__(self) -> None:
        self._of: dict[Sketch, Priced | None] = {}
        self._order: list[tuple[float, int, Sketch]] = []

    def __contains__(self, sketch: Sketch) -> bool:
        return sketch in self._of

    def add(self, sketch: Sketch, priced: Priced | None) -> None:
        """Files a sketch that was not there; None: it cannot be, or is not worth a price."""
        self._of[sketch] = priced
        if priced is not None and priced.iteration_s < float("inf"):
            bisect.insort(self._order, (float(f"{priced.iteration_s:.9g}"), len(self._of), sketch))

    def seconds(self, sketch: Sketch) -> float:
        """Returns what a sketch takes that is there."""
        return _seconds(self._of[sketch])

    def best(self, count: int) -> list[Sketch]:
        """Returns the fastest ones."""
        return [sketch for _, _, sketch in self._order[:count]]

    def priced(self) -> list[Priced]:
        """Returns what all cost that have a price, the fastest first."""
        return [priced for _, _, sketch in self._order if (priced := self._of[sketch]) is not None]
