"""The published workloads on EMULATED clusters: the best plan of every mode run, and how well foretold.

python experiments/bench_emulated.py out=docs/results/emulated       # everything, writes .json and .md
python experiments/bench_emulated.py sizes=8,16,32 rounds=1          # took 4 minutes on two cores
python experiments/bench_emulated.py profiles=grpo_llm sizes=8 rounds=1

How long everything takes (three rounds, and the mixed cluster as well) was not measured.

Nothing here runs on GPUs.  Stages sleep for what frozen profiles say; executor, Ray workers, messages and locks are
real.  The plans of a cluster run in alternation.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from published import WINNERS, h100

from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.errors import PlanError
from rlinf_embodied.execution.emulation import Emulated, Emulator
from rlinf_embodied.flow.catalogue import workflow_for
from rlinf_embodied.flow.plan import Plan
from rlinf_embodied.flow.planner import Mode, find_plans, plan_tree
from rlinf_embodied.flow.pricing import Pricer
from rlinf_embodied.flow.profile_file import load_profile
from rlinf_embodied.planning_inputs import find_cluster
from rlinf_embodied.runtime.ray_session import RaySession

MODES = (Mode.temporal, Mode.hybrid, Mode.spatial)
DEFAULTS = {"profiles": ",".join(WINNERS), "sizes": "8,16,32,mixed", "rounds": "3", "scale": "", "out": ""}


@dataclass(slots=True)
class Cell:
    """One profile on one cluster: plans by mode, and their measurements."""

    profile: str
    cluster: str
    plans: dict[str, Plan] = field(default_factory=dict)  # by mode, and "auto"
    reasons: dict[str, str] = field(default_factory=dict)  # of the modes without a plan
    results: dict[str, list[Emulated]] = field(default_factory=dict)

    def measured_s(self, mode: str) -> float:
        """Returns the median over all rounds and iterations; inf where there is no plan."""
        if mode not in self.results:
            return float("inf")
        return statistics.median(s for result in self.results[mode] for s in result.measured_s)

    def predicted_s(self, mode: str) -> float:
        """Returns what the formulas promised; inf where there is no plan."""
        return self.results[mode][0].predicted_s if mode in self.results else float("inf")

    def error(self, mode: str) -> float:
        """Returns the prediction's error as a share of the measurement."""
        return self.predicted_s(mode) / self.measured_s(mode) - 1.0

    def winner(self) -> str:
        """Returns the fastest mode as measured; auto where no mode has a plan."""
        return min((*(mode.value for mode in MODES), "auto"), key=self.measured_s)


def main(options: dict[str, str]) -> None:
    start = time.time()
    cells = [make_cell(name, size) for name in options["profiles"].split(",") for size in options["sizes"].split(",")]
    session = RaySession()
    try:
        for cell, pricer in cells:
            measure(
                cell, pricer, session, int(options["rounds"]), float(options["scale"]) if options["scale"] else None
            )
    finally:
        session.close()
    done = [cell for cell, _ in cells]
    text = report(done, time.time() - start)
    print(text)
    if options["out"]:
        path = Path(options["out"])
        path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        body = {"emulated": True, "seconds": time.time() - start, "cells": [as_dict(cell) for cell in done]}
        path.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def make_cell(name: str, size: str) -> tuple[Cell, Pricer]:
    """Plans every mode, and the best of all."""
    profile = load_profile(CONFIG_DIR / "profiles" / f"{name}.json")
    cluster = find_cluster(size) if size == "mixed" else h100(int(size))
    pricer = Pricer(workflow_for(profile), profile, cluster)
    cell = Cell(name, cluster.name)
    for mode in (Mode.any, *MODES):
        label = "auto" if mode is Mode.any else mode.value
        try:
            best = find_plans(pricer, mode)[0]
        except PlanError as error:
            cell.reasons[label] = str(error)
            continue
        cell.plans[label] = Plan(best.draft.shape(), cluster.num_devices, plan_tree(best, pricer))
    return cell, pricer


def measure(cell: Cell, pricer: Pricer, session: RaySession, rounds: int, scale: float | None) -> None:
    """Runs the plans one after the other, `rounds` times over; a plan that is auto's and a mode's runs once."""
    emulator = Emulator(pricer, session)
    for round_ in range(rounds):
        known: dict[object, Emulated] = {}
        for label, plan in cell.plans.items():
            if plan.tree not in known:
                known[plan.tree] = emulator.run(plan, 1, scale)
                show_progress(cell, label, known[plan.tree], round_)
            cell.results.setdefault(label, []).append(known[plan.tree])


def show_progress(cell: Cell, label: str, result: Emulated, round_: int) -> None:
    print(
        f"EMULATED {cell.profile} {cell.cluster} {label} {result.plan.name} round {round_}: predicted "
        f"{result.predicted_s:.2f} s, measured {result.median_s:.2f} s ({result.error:+.1%}), late "
        f"{result.late_s / result.median_s:.1%}, {result.wall_s:.1f} s on the clock",
        flush=True,
    )


# --------------------------------------------------------------------------------------------------------------- report
def report(cells: Sequence[Cell], seconds: float) -> str:
    """Returns the tables and what follows from them as Markdown."""
    labels = [mode.value for mode in MODES]
    lines = [
        "# Emulated clusters: predicted against measured",
        "",
        f"`python experiments/bench_emulated.py` ({seconds / 60:.0f} minutes). EMULATED: stages sleep for what the "
        "frozen profiles say; executor, Ray workers, messages and locks are real. Nothing ran on GPUs.",
        "",
        "Seconds per iteration, predicted / measured (error; what of the measurement is this machine's lateness).",
        "",
        "| profile | cluster | " + " | ".join(labels) + " | auto | wins | published | auto / best |",
        "|---|---|" + "---|" * (len(labels) + 4),
    ]
    lines += [_line(cell, labels) for cell in cells]
    lines += [
        "",
        "| profile | cluster | " + " | ".join(f"auto over {label}" for label in (*labels, "the worst")) + " |",
    ]
    lines += ["|---|---|" + "---|" * (len(labels) + 1)]
    for cell in cells:
        gains = {label: cell.measured_s(label) / cell.measured_s("auto") for label in (*labels, "auto")}
        texts = [f"{gains[label]:.2f}" if label in cell.results else "-" for label in labels]
        worst = max(gains[label] for label in cell.results)
        lines.append(f"| {cell.profile} | {cell.cluster} | {' | '.join(texts)} | {worst:.2f} |")
    return "\n".join([*lines, "", *_summary(cells)])


def _line(cell: Cell, labels: Sequence[str]) -> str:
    texts = [_entry(cell, label) for label in (*labels, "auto")]
    best = min(cell.measured_s(label) for label in cell.results)
    share = cell.measured_s("auto") / best
    published = WINNERS[cell.profile]
    return f"| {cell.profile} | {cell.cluster} | {' | '.join(texts)} | {cell.winner()} | {published} | {share:.3f} |"


def _entry(cell: Cell, label: str) -> str:
    if label not in cell.results:
        return "-"
    late = max(result.late_s for result in cell.results[label]) / cell.measured_s(label)
    return f"{cell.predicted_s(label):.1f} / {cell.measured_s(label):.1f} ({cell.error(label):+.1%}; {late:.1%})"


def _summary(cells: Sequence[Cell]) -> list[str]:
    errors = sorted(abs(cell.error(label)) for cell in cells for label in cell.results)
    shares = [cell.measured_s("auto") / min(cell.measured_s(label) for label in cell.results) for cell in cells]
    matches = sum(cell.winner() == WINNERS[cell.profile] for cell in cells)
    lines = [
        f"- error of the predictions: median {statistics.median(errors):.2%}, worst {errors[-1]:.2%} (goal 3 %, 8 %)",
        f"- auto against the best measured mode: at worst {max(shares) - 1:+.1%} (goal 3 %)",
        f"- the published winner is first in {matches} of {len(cells)} cells",
    ]
    reasons = [
        f"- {cell.profile} on {cell.cluster}, {label}: {reason}"
        for cell in cells
        for label, reason in cell.reasons.items()
    ]
    return lines + reasons


def as_dict(cell: Cell) -> dict[str, object]:
    """Returns a cell as JSON-ready data."""
    results = {label: [result.to_dict() for result in results] for label, results in cell.results.items()}
    return {"profile": cell.profile, "cluster": cell.cluster, "results": results, "reasons": cell.reasons}


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the options, each `name=value`; ends the program where one is unknown."""
    given = {key: value for key, _, value in (text.partition("=") for text in arguments)}
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        print(
            f"error: unknown options {unknown}: use {', '.join(f'{k}={v}' for k, v in DEFAULTS.items())}",
            file=sys.stderr,
        )
        sys.exit(2)
    return DEFAULTS | given


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
