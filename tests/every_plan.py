"""All plans of a case small enough, which share only the simulation with the search.

They differ in the order of stages, streaming, chunks, shards, devices, blocks per device and, if not everything fits,
exclusive pairs.  Plans with a device that has more work than the best plan takes are skipped.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Item, Place, Plan, in_order
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import Simulator


class Enumeration:
    """All plans of one case."""

    def __init__(self, pricer: Pricer, limit_s: float) -> None:
        self.pricer, self.work = pricer, pricer.workflow
        self.simulator, self.until = Simulator(pricer), time.process_time() + limit_s
        self.simulated, self.complete = 0, True
        self.best_s, self.best = math.inf, ""
        self._places: dict[tuple[str, int], list[tuple[Place, dict[int, float]]]] = {}

    def run(self, at_most_s: float) -> None:
        """Tries all plans that may be faster than a known one."""
        self.best_s = at_most_s
        for order in self._orders():
            for form in self._forms(order):
                self._fill(form, (), {}, ())
                if time.process_time() > self.until:
                    self.complete = False
                    return

    def _orders(self) -> Iterator[tuple[tuple[str, ...], ...]]:
        units = [item.stages for item in in_order(self.work, {s: Place(s, ()) for s in self.work.stages})]
        for order in itertools.permutations(units):
            place = {stage: i for i, unit in enumerate(order) for stage in unit}
            if all(place[e.source] <= place[e.target] for e in self.work.edges):
                yield order

    def _forms(self, order: tuple[tuple[str, ...], ...]) -> Iterator[tuple[tuple[tuple[str, ...], int], ...]]:
        """Yields (stages, chunks, or minus shards of a loop) of all items, for every way to stream neighbours."""
        if not order:
            yield ()
            return
        loop = self.work.loop_of(order[0][0])
        blocks = self.work.num_blocks
        for size in range(1, len(order) + 1 if loop is None else 2):
            stages = tuple(stage for unit in order[:size] for stage in unit)
            if size > 1 and any(len(unit) > 1 for unit in order[:size]):
                break
            chunks = [1] if size == 1 else [k for k in range(2, blocks + 1) if blocks % k == 0]
            for parts in [-n for n in loop.shards if n <= blocks] if loop else chunks:
                for rest in self._forms(order[size:]):
                    yield ((stages, parts), *rest)

    def _fill(self, form, items: tuple[Item, ...], busy: dict[int, float], places: tuple[Place, ...]) -> None:
        """Places the stages of the first item one after the other, then those of the other ones."""
        if time.process_time() > self.until:
            return
        if not form:
            self._try(items)
            return
        (stages, parts), *rest = form
        if len(places) == len(stages):
            item = Item(places, max(parts, 1), max(-parts, 1))
            self._fill(rest, (*items, item), busy, ())
            return
        for place, own in self._choices(stages[len(places)], parts):
            total = {d: busy.get(d, 0.0) + own.get(d, 0.0) for d in busy.keys() | own.keys()}
            if max(total.values()) < self.best_s * (1 - 1e-9):
                self._fill(form, items, total, (*places, place))

    def _choices(self, stage: str, parts: int) -> list[tuple[Place, dict[int, float]]]:
        """Returns all places of a stage, each with the seconds of work of its devices, the least work first."""
        key = stage, parts
        if key not in self._places:
            found = []
            for place in self._all_places(stage, max(parts, 1)):
                layout = self.pricer.layouts.of(place, max(parts, 1))
                loop, own = self.work.loop_of(stage), dict.fromkeys(layout.hosts, 0.0)
                streams = self.pricer.profile.stages[stage].finish_quantiles
                whole = self.pricer.layouts.of(place, 1) if streams else layout
                for device, seconds in zip(whole.devices, self.simulator.lengths(stage, whole), strict=True):
                    own[device] += seconds * (loop.chunk_steps if loop else 1)
                found.append((place, own))
            self._places[key] = sorted(found, key=lambda entry: max(entry[1].values()))
        return self._places[key]

    def _all_places(self, stage: str, chunks: int) -> Iterator[Place]:
        devices = [d for d in range(self.pricer.cluster.num_devices) if self.pricer.runs_on(stage, d)]
        units, each = self.work.num_blocks // chunks, self.work.stages[stage].devices_per_worker
        workers = devices[::each]  # those that can run it are complete groups
        for size in range(1, min(len(workers), units) + 1):
            for chosen in itertools.combinations(workers, size):
                chosen = tuple(d + k for d in chosen for k in range(each))
                yield Place(stage, chosen)
                for ends in itertools.combinations(range(1, units), size - 1) if size > 1 else ():
                    sizes = (b - a for a, b in itertools.pairwise((0, *ends, units)))
                    yield Place(stage, chosen, tuple(n * chunks for n in sizes))

    def _try(self, items: tuple[Item, ...]) -> None:
        plan = Plan("", self.pricer.cluster.num_devices, items)
        try:
            check(plan, self.work)
        except PlanError:
            return
        if self.pricer.fits(plan):
            self._simulate(plan)
            return
        stages = {name for name, stage in self.pricer.profile.stages.items() if not stage.stays}
        both = itertools.combinations(items, 2)
        pairs = [p for a, b in both for p in itertools.product(a.stages, b.stages) if stages.issuperset(p)]
        for size in range(1, len(pairs) + 1):  # a pair more never makes a plan that fits faster
            switching = (replace(plan, exclusive=some) for some in itertools.combinations(pairs, size))
            enough = [one for one in switching if self.pricer.fits(one)]
            for one in enough:
                self._simulate(one)
            if enough and size > 2:
                return

    def _simulate(self, plan: Plan) -> None:
        self.simulated += 1
        seconds = self.simulator.run(plan).iteration_s
        if seconds < self.best_s * (1 - 1e-9):
            self.best_s, self.best = seconds, to_text(plan)
