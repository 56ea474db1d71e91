"""How often, and by how much, the search misses the best plan of small random cases, whose plans are all enumerated.

python -m experiments.bench.planner.brute_force [cases=100] [seed=0] [stages=4] [devices=3] [shares=true] [limit_s=60]
                                               [out=brute_force]

The plans differ in the order of stages, streaming, chunks, shards, devices, blocks per device and, if not everything
fits, exclusive pairs.  Plans with a device that has more work than the best plan takes are skipped.  The enumeration
shares only the simulation with the search.  A case that takes longer than limit_s is
reported as incomplete.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from experiments.bench.harness import Benchmark, Report, Run, Table
from experiments.bench.planner.random_cases import random_case
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Item, Place, Plan, in_order
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: int = 100
    seed: int = 0
    stages: int = 4
    devices: int = 3
    shares: bool = True
    limit_s: float = 60.0
    out: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What came of a case; seconds per iteration."""

    seed: int
    stages: int
    devices: int
    blocks: int
    search_s: float
    best_s: float
    simulated: int
    complete: bool
    cpu_s: float  # of the search
    best: str

    @property
    def regret(self) -> float:
        """By how much the search's plan is slower than the best one, as a share."""
        return max(0.0, self.search_s / self.best_s - 1.0)

    def row(self) -> dict[str, str]:
        """Returns its cells of the table."""
        return {
            **{"case": str(self.seed), "stages": str(self.stages), "devices": str(self.devices)},
            **{"blocks": str(self.blocks), "search s": f"{self.search_s:.4g}", "best s": f"{self.best_s:.4g}"},
            **{"regret": f"{self.regret:.2%}", "plans": str(self.simulated), "complete": str(self.complete)},
            **{"CPU s": f"{self.cpu_s:.2f}", "best plan": self.best if self.regret > 0.001 else ""},
        }


class Enumeration:
    """All plans of one case."""

    def __init__(self, pricer: Pricer, shares: bool, limit_s: float) -> None:
        self.pricer, self.work, self.shares = pricer, pricer.workflow, shares
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
        units = self.work.num_blocks // chunks
        for size in range(1, min(len(devices), units) + 1):
            for chosen in itertools.combinations(devices, size):
                yield Place(stage, chosen)
                for ends in itertools.combinations(range(1, units), size - 1) if self.shares and size > 1 else ():
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


def compare(seed: int, own: Options) -> Case | None:
    """Searches and enumerates a case; None where nothing fits."""
    pricer = random_case(seed, own.stages, own.devices)
    start = time.process_time()
    try:
        ranking = rank(pricer, search_s=600.0)
    except PlanError:
        return None
    cpu_s, search_s = time.process_time() - start, ranking.best.iteration_s
    found = Enumeration(pricer, own.shares, own.limit_s)
    found.run(search_s)
    work = pricer.workflow
    return Case(
        *(seed, len(work.stages), pricer.cluster.num_devices, work.num_blocks, search_s),
        *(found.best_s, found.simulated, found.complete, cpu_s, found.best),
    )


def measure(run: Run[Options]) -> Report:
    """Compares case by case."""
    own, cases = run.options, []
    for seed in range(own.seed, own.seed + own.cases):
        case = compare(seed, own)
        if case is not None:
            cases.append(case)
            print(" ".join(case.row().values()), flush=True)
    regrets = sorted(case.regret for case in cases)
    summary = (
        f"{len(cases)} cases, {sum(case.complete for case in cases)} complete: {sum(r > 0.01 for r in regrets)} "
        f"over 1 %, {sum(r > 0.001 for r in regrets)} over 0.1 %, worst {regrets[-1]:.2%}"
    )
    print(summary)
    table = Table(list(cases[0].row()), [list(case.row().values()) for case in cases if case.regret > 0.001])
    content = {"cases": [asdict(case) for case in cases], "summary": summary}
    return Report(content=content, text=f"{table}\n{summary}", markdown=f"{summary}\n\n{table.markdown()}")


BENCHMARK = Benchmark("planner.brute_force", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
