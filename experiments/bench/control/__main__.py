"""Learning curves over seeds of experiments/train_vla.py: algorithms that learn from transitions, and two levels.

python -m experiments.bench.control [cases=sac,iql] [seeds=6201,6202] [points=10] [out=...] [folder=...] [overrides]

Cases are those of cases.py, all if none is named, each in one process on one core; overrides come after their own
words.  Runs that `folder` holds already are not trained again, so an interrupted benchmark resumes, and cases can be
run one by one.  A curve is the outcome of greedy held-out episodes at `points` numbers of env steps (of updates, if
the algorithm learns from recorded data alone).

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.control.cases import CASES, COMMON, UNSEEN, place_of, words_of
from experiments.bench.harness import Benchmark, chosen, table, trained_run
from experiments.bench.harness import Run as Asked
from experiments.bench.harness.curves import Curve, Panel, draw_panels
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config.checks import require_numbers
from rlinf_embodied.embodied.outcome import shown
from rlinf_embodied.reporting.sections import over_seeds
from rlinf_embodied.reporting.seeds import seeds_of
from rlinf_embodied.telemetry.plots import rate_lines
from rlinf_embodied.telemetry.run_reader import SHARES, Run

POINTS = 10  # of a curve
HEADER = (
    *("case", "after", "metric", "before, median", "after: worst", "median", "best", "interquartile mean"),
    *("kept", "s of training"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""  # names of cases.py joined by commas; "": all
    seeds: str = UNSEEN
    points: int = POINTS
    folder: str = "runs/bench_control"
    out: str = ""


def trained(name: str, seed: int, folder: Path, overrides: Sequence[str], points: int = POINTS) -> Run:
    """Returns the run of a case; it, and the one that it begins with, are trained now unless `folder` has them.

    Raises:
        ConfigError: the folder has a training with other settings in its place, or the words make no training.
        WorkerError: the training failed; its log is named.
    """
    if CASES[name].source:
        trained(CASES[name].source, seed, folder, overrides, points)
    place, words = place_of(folder, name, seed), words_of(name, seed, folder, overrides)
    every = max(1, compose_train(words).run.num_iterations // points)
    words += [f"eval.every={every}", "eval.record_video=false"]
    return trained_run(f"{name}, seed {seed}", place, words)


def score_of(run: Run) -> str:
    return "success_once" if "success_once" in run.before else "return"


def curve(run: Run) -> Curve:
    """Returns (env steps or updates, held-out success in per cent or else return), from the evaluation before on."""
    return rate_lines(run, score_of(run), "")[1].points


def row(name: str, runs: Sequence[Run], metric: str) -> tuple[str, ...]:
    """Returns median, worst and best over the seeds, and the interquartile mean with its interval; success in per cent.

    `kept` is how many transitions the replay buffer of the first seed ends with: of HG-DAgger, the human's.
    """
    factor = 100 if metric in SHARES else 1
    before, after = [factor * run.before[metric] for run in runs], [factor * run.after[metric] for run in runs]
    numbers = (statistics.median(before), min(after), statistics.median(after), max(after))
    kept = [line.get("rollout/replay_size") for line in runs[0].metrics[-1:]]
    return (
        *(name, f"{runs[0].kept_step:,.0f} {CASES[name].unit}", metric, *(f"{number:.1f}" for number in numbers)),
        over_seeds(runs, metric),
        f"{kept[0]:,.0f}" if kept and kept[0] is not None else "-",
        f"{statistics.median(run.summary['rl_s'] for run in runs):.0f}",
    )


def panel_of(name: str, runs: Sequence[Run]) -> Panel:
    label = "success, %" if score_of(runs[0]) == "success_once" else "return"
    return Panel(name, CASES[name].unit, label, {f"mean of {len(runs)} seeds": [curve(run) for run in runs]})


def measure(asked: Asked[Options]) -> None:
    """Trains case by case; what others begin with comes before them.

    Raises:
        ConfigError: seeds or points that are no numbers, an unknown case, or a folder of other settings.
    """
    require_numbers(asked.options, "", "points", low=1)
    own, runs, found = asked.options, dict[str, list[Run]](), dict[str, list[dict[str, object]]]()
    names, seeds = list(chosen(own.cases, CASES)), seeds_of(own.seeds, "seeds")
    settings = {name: [*CASES[name].words, *COMMON, *asked.overrides] for name in names}
    for name in names:
        for seed in seeds:
            run = trained(name, seed, Path(own.folder).absolute(), asked.overrides, own.points)
            print(f"{name}, seed {seed}: {shown(run.before)} -> {shown(run.after)}", flush=True)
            runs.setdefault(name, []).append(run)
            found.setdefault(name, []).append({"seed": seed, "curve": curve(run), "summary": run.summary})
            asked.write({"settings": settings, "curves": found})
    rows = [row(name, several, metric) for name, several in runs.items() for metric in several[0].rates]
    print("", table(HEADER, rows), sep="\n")
    draw_panels([panel_of(name, several) for name, several in runs.items()], own.out)


BENCHMARK = Benchmark("control", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    BENCHMARK.main()
