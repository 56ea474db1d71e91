"""Learning curves over seeds of experiments/train_vla.py: algorithms that learn from transitions, and two levels.

python -m experiments.bench.control [cases=sac,iql] [seeds=6201,6202] [points=10] [out=...] [folder=...] [overrides]

Cases are those of cases.py, all if none is named, each in one process on one core; overrides come after their own
words.  Runs that `folder` holds already are not trained again, so an interrupted benchmark resumes, and cases can be
run one by one.  A curve is the outcome of greedy held-out episodes at `points` numbers of env steps (of updates, if the
algorithm learns from recorded data alone).

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.bench.control import cases
from experiments.bench.control.cases import UNSEEN
from experiments.bench.control.curves import Curve, draw, seeds_of
from experiments.bench.harness import Benchmark, Report, Run, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""  # names of cases.py joined by commas; "": all
    seeds: str = UNSEEN
    points: int = 10
    folder: str = "runs/bench_control"
    out: str = ""


def measure(run: Run[Options]) -> Report:
    """Trains case by case; what others begin with comes before them.

    Raises:
        ConfigError: seeds that are no numbers, an unknown case, or a folder of other settings.
    """
    own, curves = run.options, dict[str, list[Curve]]()
    names, seeds = list(chosen(own.cases, cases.CASES, "cases")), seeds_of(own.seeds)
    settings = {name: [*cases.CASES[name].words, *cases.COMMON, *run.overrides] for name in names}
    plain = lambda: {name: [asdict(curve) for curve in several] for name, several in curves.items()}  # noqa: E731
    for name in names:
        for seed in seeds:
            found = cases.case_curve(name, seed, Path(own.folder).absolute(), own.points, run.overrides)
            curves.setdefault(name, []).append(found)
            run.keep({"settings": settings, "curves": plain()})
    each = [cases.said(name, curve) for name, several in curves.items() for curve in several]
    panels: dict[str, dict[str, Sequence[Curve]]] = {name: {"ours": several} for name, several in curves.items()}
    return Report(
        content={"settings": settings, "curves": plain()},
        text="\n".join([*each, "", str(cases.table(curves))]),
        draw=lambda path: draw(panels, {name: cases.CASES[name].unit for name in names}, path),
    )


BENCHMARK = Benchmark("control", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
