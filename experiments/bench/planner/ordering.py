"""Which kind of plan wins on 8, 16 and 32 GPUs, for the profiles made of published numbers, and how surely.

python -m experiments.bench.planner.ordering            # orderings, and how far each number can move at 8 GPUs
python -m experiments.bench.planner.ordering quick      # orderings only
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from experiments.bench.harness import Benchmark, Report, Run, Table
from experiments.bench.planner.published import WINNERS, frozen, h100, pricer_of
from rlinf_embodied.planning.planner import find_plans
from rlinf_embodied.planning.profile import workflow_for
from rlinf_embodied.planning.sensitivity import MODES, TurningPoint, times_by_mode, turning_points, winner

ORDERING = ("profile", "GPUs", *(f"{mode} s" for mode in MODES), "wins", "published", "auto s", "worst / auto")
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
    if not run.options.quick:
        show("turning points", TURNS, [row for name in WINNERS for row in turns(name)])
    return Report(content=content)


BENCHMARK = Benchmark("planner.ordering", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
