"""How often, and by how much, the planner misses the best plan of small random cases; every plan of a case is tried.

python -m experiments.bench.planner.brute_force cases=200 seed=0 stages=5 devices=4 [most=4000] [out=<file>]
python -m experiments.bench.planner.brute_force cases=200 stages=4 devices=3 staleness=1
python -m experiments.bench.planner.brute_force cases=200 stages=3 devices=2 shares=true

A case is random_cases.py's for seed, seed + 1, ...; every_plan.py looks for a plan that is faster than the planner's by
more than 0.1 %, and gives up (the case counts as unfinished, with what was found by then) after `most` simulations.
All seconds are those of planning/simulate.py, call by call what the executor does.  "formulas" is the plan that
the search on whole regions would choose by its formulas, "planner" the one that is chosen.  With a staleness, all plans
have that, and every workflow has weights for one of its first stages; with shares, devices are of unlike speeds, and
the blocks of each stage are divided among its devices in every way.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass

from experiments.bench.harness import Benchmark, Report, Run, Table
from experiments.bench.planner.every_plan import EveryPlan
from experiments.bench.planner.random_cases import random_case, with_speeds, with_weights
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.planner import Mode, Search, draft_tree, ranked, runs_ahead
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import Simulator

SAME = 1e-3  # a smaller difference is none
HEADER = (
    "cases",
    "plan",
    "number",
    "unfinished",
    "same",
    "within 1 %",
    "median loss",
    "90th percentile",
    "worst",
    "its seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: int = 100
    seed: int = 0
    stages: int = 5
    devices: int = 4
    most: int = 4000
    staleness: int = 0
    shares: bool = False
    out: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case: the planner's plan and the best one; no seconds where there is no plan."""

    seed: int
    features: tuple[str, ...]
    planner_s: float | None
    formulas_s: float | None
    best_s: float | None
    planner: dict[str, object] | None
    best: dict[str, object] | None  # where it is better than the planner's
    complete: bool
    num_simulated: int
    planning_s: float  # CPU seconds
    trying_s: float

    def loss(self, formulas: bool = False) -> float:
        """By how much a plan takes longer, as a share of the best one's seconds; inf where there is only the latter."""
        seconds = self.formulas_s if formulas else self.planner_s
        if self.best_s is None:
            return 0.0
        return float("inf") if seconds is None else seconds / self.best_s - 1.0


def outcome(seed: int, options: Options) -> Outcome:
    """Plans a case and tries every plan of it."""
    pricer = random_case(seed, options.stages, options.devices)
    pricer = with_weights(pricer, seed) if options.staleness else pricer
    pricer = with_speeds(pricer, seed) if options.shares else pricer
    staleness = options.staleness if runs_ahead(pricer.workflow) else 0
    simulator, start = Simulator(pricer), time.process_time()
    search = Search(pricer)
    drafts = search.run()
    found = ranked(drafts, pricer, Mode.any, staleness, search.apart() if staleness else [])
    planned = time.process_time()
    formulas_s = simulator.run(draft_tree(drafts[0], pricer), staleness=staleness).iteration_s if drafts else None
    planner_s = found[0].iteration_s if found else None
    every = EveryPlan(pricer, options.most, staleness=staleness, with_shares=options.shares)
    best = every.best(planner_s if planner_s is not None else float("inf"))
    trees = found[0].tree if found else None, best.tree
    named = [
        None if tree is None else Plan("", pricer.cluster.num_devices, tree, staleness).to_dict() for tree in trees
    ]
    return Outcome(
        seed=seed,
        features=features(pricer),
        planner_s=planner_s,
        formulas_s=formulas_s,
        best_s=planner_s if best.tree is None else best.seconds,
        planner=named[0],
        best=named[1],
        complete=best.complete,
        num_simulated=best.num_simulated,
        planning_s=planned - start,
        trying_s=time.process_time() - planned,
    )


def features(pricer: Pricer) -> tuple[str, ...]:
    """Returns the kinds of cases that a case belongs to."""
    held = sum(max(stage.resident_bytes.flat) for stage in pricer.profile.stages.values())
    kinds = {
        "a loop": bool(pricer.workflow.loops),
        "little memory": held > min(group.memory_bytes for group in pricer.classes),
        "two kinds of devices": len({group.kind for group in pricer.classes}) > 1,
        "two speeds": len({group.speed for group in pricer.classes}) > 1,
        "two nodes": pricer.classes[0].num_nodes > 1,
        "a long tail": any(stage.finish_quantiles for stage in pricer.profile.stages.values()),
    }
    return tuple(name for name, holds in kinds.items() if holds)


def summary(name: str, outcomes: list[Outcome], formulas: bool) -> tuple[str, ...]:
    """Returns the row of some cases."""
    losses = sorted(one.loss(formulas) for one in outcomes)
    worst = max(outcomes, key=lambda one: one.loss(formulas))
    shares = [sum(loss <= limit for loss in losses) / len(losses) for limit in (SAME, 0.01)]
    marks = (statistics.median(losses), losses[-(-9 * len(losses) // 10) - 1], losses[-1])
    unfinished = str(sum(not one.complete for one in outcomes))
    percents = (*(f"{share:.0%}" for share in shares), *(f"{mark:.2%}" for mark in marks))
    return name, "formulas" if formulas else "planner", str(len(outcomes)), unfinished, *percents, str(worst.seed)


def records(outcomes: list[Outcome]) -> list[dict[str, object]]:
    """Returns the cases as JSON-ready data."""
    return [{**asdict(one), "loss": one.loss(), "formulas_loss": one.loss(True)} for one in outcomes]


def measure(run: Run[Options]) -> Report:
    """Goes through all cases; what is there so far is kept."""
    own, outcomes = run.options, []
    for seed in range(own.seed, own.seed + own.cases):
        outcomes.append(outcome(seed, own))
        if len(outcomes) % 10 == 0:
            run.keep({"cases": records(outcomes)})
    kinds = sorted({kind for one in outcomes for kind in one.features})
    groups = [("all", outcomes), *((kind, [one for one in outcomes if kind in one.features]) for kind in kinds)]
    table = Table(HEADER, [summary(name, some, formulas) for name, some in groups for formulas in (True, False)])
    spent = [sum(getattr(one, name) for one in outcomes) for name in ("planning_s", "trying_s")]
    text = f"{table.markdown()}\n\nCPU seconds: planning {spent[0]:.1f}, trying every plan {spent[1]:.1f}"
    return Report(content={"cases": records(outcomes)}, text=text)


BENCHMARK = Benchmark("planner.brute_force", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
