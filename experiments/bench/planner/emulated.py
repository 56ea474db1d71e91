"""The published workloads on EMULATED clusters: the best plan of every kind run, and how well it was predicted.

python -m experiments.bench.planner.emulated out=docs/results/emulated       # everything, writes .json and .md
python -m experiments.bench.planner.emulated sizes=8,16,32 rounds=1          # took 4 minutes on two cores
python -m experiments.bench.planner.emulated profiles=grpo_llm sizes=8 rounds=1 [scale=<time scale>]

How long everything takes (three rounds, and the mixed cluster as well) was not measured.

Nothing here runs on GPUs.  Stages sleep for what frozen profiles say; executor, Ray workers, messages and locks are
real.  The plans of a cluster run in alternation.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from experiments.bench.harness import Benchmark, Report, Run, Table, alternate, command_text, names_of
from experiments.bench.planner.published import WINNERS, best_plan, frozen, h100, pricer_of
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.tools.emulation import Emulated, Emulator
from rlinf_embodied.tools.plans import find_cluster

LABELS = [kind.value for kind in Kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    profiles: str = ",".join(WINNERS)
    sizes: str = "8,16,32,mixed"
    rounds: int = 3
    scale: float = 0.0  # of time; 0: as long as the machine's own part stays small
    out: str = ""


@dataclass(slots=True)
class Cell:
    """One profile on one cluster: plans by kind, and their measurements."""

    profile: str
    cluster: str
    plans: dict[str, Plan] = field(default_factory=dict)  # by kind, and "auto"
    reasons: dict[str, str] = field(default_factory=dict)  # of the kinds without a plan
    results: dict[str, list[Emulated]] = field(default_factory=dict)

    def measured_s(self, kind: str) -> float:
        """Returns the median over all rounds and iterations; inf where there is no plan."""
        if kind not in self.results:
            return float("inf")
        return statistics.median(s for result in self.results[kind] for s in result.measured_s)

    def predicted_s(self, kind: str) -> float:
        """Returns what was predicted; inf where there is no plan."""
        return self.results[kind][0].predicted_s if kind in self.results else float("inf")

    def error(self, kind: str) -> float:
        """Returns the prediction's error as a share of the measurement."""
        return self.predicted_s(kind) / self.measured_s(kind) - 1.0

    def winner(self) -> str:
        """Returns the fastest kind as measured; auto where no kind has a plan."""
        return min((*LABELS, "auto"), key=self.measured_s)

    def behind(self) -> float:
        """Returns auto's time over that of the fastest."""
        return self.measured_s("auto") / min(self.measured_s(label) for label in self.results)

    def to_json(self) -> dict[str, object]:
        results = {label: [result.to_dict() for result in results] for label, results in self.results.items()}
        return {"profile": self.profile, "cluster": self.cluster, "results": results, "reasons": self.reasons}


def make_cell(name: str, size: str) -> tuple[Cell, Pricer]:
    """Plans every kind, and the best of all."""
    cluster = find_cluster(size) if size == "mixed" else h100(int(size))
    pricer, cell = pricer_of(frozen(name), cluster), Cell(name, cluster.name)
    for kind in (None, *Kind):
        label = "auto" if kind is None else kind.value
        try:
            cell.plans[label], _ = best_plan(pricer, kind)
        except PlanError as error:
            cell.reasons[label] = str(error)
    return cell, pricer


def emulate(cell: Cell, pricer: Pricer, session: RaySession, own: Options) -> None:
    """Runs the plans in turn, `rounds` times over; a plan that is auto's and a kind's runs once."""
    emulator = Emulator(pricer, session)
    plans = {plan.items: plan for plan in cell.plans.values()}
    label_of = {plan.items: label for label, plan in reversed(cell.plans.items())}

    def said(round_: int, label: str, result: Emulated) -> None:
        print(
            f"EMULATED {cell.profile} {cell.cluster} {label} {result.plan.name} round {round_}: predicted "
            f"{result.predicted_s:.2f} s, measured {result.median_s:.2f} s ({result.error:+.1%}), late "
            f"{result.late_s / result.median_s:.1%}, {result.wall_s:.1f} s on the clock",
            flush=True,
        )

    arms = {label_of[items]: partial(emulator.run, plan, 1, own.scale or None) for items, plan in plans.items()}
    found = alternate(arms, own.rounds, said=said)
    cell.results = {label: found[label_of[plan.items]] for label, plan in cell.plans.items()}


# --------------------------------------------------------------------------------------------------------------- report
def page(cells: Sequence[Cell], command: str, seconds: float) -> str:
    """Returns the tables and what follows from them as Markdown."""
    header = ("profile", "cluster", *LABELS, "auto", "wins", "published", "auto / best")
    gains = ("profile", "cluster", *(f"auto over {label}" for label in (*LABELS, "the worst")))
    lines = [
        "# Emulated clusters: predicted against measured",
        f"{command} ({seconds / 60:.0f} minutes). EMULATED: stages sleep for what the frozen profiles say; executor, "
        "Ray workers, messages and locks are real. Nothing ran on GPUs.",
        "Seconds per iteration, predicted / measured (error; what of the measurement is this machine's lateness).",
        Table(header, [_line(cell) for cell in cells]).markdown(),
        Table(gains, [_gains(cell) for cell in cells]).markdown(),
        "\n".join(_summary(cells)),
    ]
    return "\n\n".join(lines)


def _line(cell: Cell) -> tuple[str, ...]:
    entries = [_entry(cell, label) for label in (*LABELS, "auto")]
    return cell.profile, cell.cluster, *entries, cell.winner(), WINNERS[cell.profile], f"{cell.behind():.3f}"


def _entry(cell: Cell, label: str) -> str:
    if label not in cell.results:
        return "-"
    late = max(result.late_s for result in cell.results[label]) / cell.measured_s(label)
    return f"{cell.predicted_s(label):.1f} / {cell.measured_s(label):.1f} ({cell.error(label):+.1%}; {late:.1%})"


def _gains(cell: Cell) -> tuple[str, ...]:
    gains = {label: cell.measured_s(label) / cell.measured_s("auto") for label in cell.results}
    texts = [f"{gains[label]:.2f}" if label in gains else "-" for label in LABELS]
    return cell.profile, cell.cluster, *texts, f"{max(gains.values()):.2f}"


def _summary(cells: Sequence[Cell]) -> list[str]:
    errors = sorted(abs(cell.error(label)) for cell in cells for label in cell.results)
    matches = sum(cell.winner() == WINNERS[cell.profile] for cell in cells)
    return [
        f"- error of the predictions: median {statistics.median(errors):.2%}, worst {errors[-1]:.2%} (goal 3 %, 8 %)",
        f"- auto against the best measured kind: at worst {max(cell.behind() for cell in cells) - 1:+.1%} (goal 3 %)",
        f"- the published winner is first in {matches} of {len(cells)} cells",
        *(f"- {c.profile} on {c.cluster}, {label}: {reason}" for c in cells for label, reason in c.reasons.items()),
    ]


def measure(run: Run[Options]) -> Report:
    """Emulates every profile on every cluster."""
    start, own = time.time(), run.options
    cells = [make_cell(name, size) for name in names_of(own.profiles) for size in names_of(own.sizes)]
    session = RaySession()
    try:
        for cell, pricer in cells:
            emulate(cell, pricer, session, own)
    finally:
        session.close()
    seconds = time.time() - start
    text = page([cell for cell, _ in cells], command_text("planner.emulated", run.known), seconds)
    content = {"emulated": True, "seconds": seconds, "cells": [cell.to_json() for cell, _ in cells]}
    return Report(content=content, text=text, markdown=text)


BENCHMARK = Benchmark("planner.emulated", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
