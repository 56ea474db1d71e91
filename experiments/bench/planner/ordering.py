"""Which kind of plan wins on 8, 16 and 32 GPUs, for the profiles made of published numbers, and how surely.

python -m experiments.bench.planner.ordering            # orderings, and how far each number can move at 8 GPUs
python -m experiments.bench.planner.ordering quick      # orderings and planning times only
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial

from experiments.bench.harness import Benchmark, Report, Run, Table, seconds_of
from experiments.bench.planner.published import WINNERS, frozen, h100, pricer_of
from rlinf_embodied.flow import allocations
from rlinf_embodied.flow.measured import workflow_for
from rlinf_embodied.flow.planner import Mode, find_plans
from rlinf_embodied.flow.sensitivity import MODES, TurningPoint, times_by_mode, turning_points, winner

ORDERING = ("profile", "GPUs", *(f"{mode} s" for mode in MODES), "wins", "published", "auto s", "worst / auto")
PLANNING = ("workflow", "devices", "planning CPU s")
COARSE = ("workflow", "devices", "mode", "coarse s", "every device s", "cost")
TURNS = ("profile at 8 GPUs", "number", "another mode wins below", "above")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    quick: bool = False
    out: str = ""


def ordering(name: str, num_devices: int) -> tuple[str, ...]:
    """Returns the seconds of each mode's best plan, and which wins."""
    profile, cluster = frozen(name), h100(num_devices)
    times = times_by_mode(workflow_for(profile), profile, cluster)
    auto = find_plans(pricer_of(profile, cluster))[0].iteration_s
    worst = max(seconds for seconds in times.values() if seconds < float("inf"))
    cells = [f"{times[mode]:.1f}" for mode in MODES]
    return name, str(num_devices), *cells, str(winner(times)), WINNERS[name], f"{auto:.1f}", f"{worst / auto:.2f}"


def planning_time(name: str, num_devices: int) -> tuple[str, ...]:
    """Returns the CPU seconds of a search; plans for thousands of devices are for thousands of times the work."""
    workload = frozen(name).workload
    assert workload is not None
    profile = frozen(name, workload.num_items * max(1, num_devices // 8))
    seconds = seconds_of(partial(find_plans, pricer_of(profile, h100(num_devices))), clock=time.process_time)
    return name, str(num_devices), f"{seconds:.3f}"


def coarsening(name: str, num_devices: int, mode: Mode) -> tuple[str, ...]:
    """Compares the search over coarse allocations with the one over every number of devices."""

    def best() -> float:
        return find_plans(pricer_of(frozen(name), h100(num_devices)), mode, width=4)[0].iteration_s

    coarse = best()
    kept, allocations.EXACT_DEVICES = allocations.EXACT_DEVICES, num_devices
    try:
        exact = best()
    finally:
        allocations.EXACT_DEVICES = kept
    return name, str(num_devices), str(mode), f"{coarse:.2f}", f"{exact:.2f}", f"{coarse / exact - 1:+.2%}"


def turn_cells(turn: TurningPoint) -> tuple[str, str, str]:
    """Returns how far a number can move until another mode wins."""
    below = "never (x 0.1)" if turn.below is None else f"x {turn.below[0]} ({turn.below[1]})"
    return turn.what, below, "never (x 10)" if turn.above is None else f"x {turn.above[0]} ({turn.above[1]})"


def turns(name: str) -> list[tuple[str, ...]]:
    """Returns a row per number of a profile."""
    profile = frozen(name)
    return [(name, *turn_cells(turn)) for turn in turning_points(workflow_for(profile), profile, h100(8))]


def measure(run: Run[Options]) -> Report:
    """Plans everything; each table is shown as soon as it is there."""
    content = {}

    def show(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        print(Table(header, rows).markdown(), end="\n\n", flush=True)
        content[title] = [dict(zip(header, row, strict=True)) for row in rows]

    show("orderings", ORDERING, [ordering(name, number) for name in WINNERS for number in (8, 16, 32)])
    workflows = ("maniskill_openvla", "ppo_llm")
    show("planning", PLANNING, [planning_time(name, n) for name in workflows for n in (8, 64, 1024, 4096)])
    modes = (Mode.any, Mode.hybrid, Mode.spatial)
    show("coarse allocations", COARSE, [coarsening(name, 32, mode) for name in WINNERS for mode in modes])
    if not run.options.quick:
        show("turning points", TURNS, [row for name in WINNERS for row in turns(name)])
    return Report(content=content)


BENCHMARK = Benchmark("planner.ordering", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
