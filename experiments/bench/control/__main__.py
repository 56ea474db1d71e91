"""Learning curves over seeds of experiments/train_vla.py: algorithms that learn from transitions, and two levels.

python -m experiments.bench.control [cases=sac,iql] [seeds=6201,6202] [points=10] [out=...] [folder=...] [overrides]

Cases are those of cases.py, all if none is named, each in one process on one core; overrides come after their own
words.  Runs that `folder` holds already are not trained again, so an interrupted benchmark resumes, and cases can be
run one by one.  A curve is the outcome of greedy held-out episodes at `points` numbers of env steps (of updates, if the
algorithm learns from recorded data alone).

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.control.cases import CASES, COMMON, UNSEEN, place_of, words_of
from experiments.bench.harness import Benchmark, Report, Table, chosen, trained_run
from experiments.bench.harness import Run as Asked
from rlinf_embodied.compose import compose_train
from rlinf_embodied.embodied.outcome import shown
from rlinf_embodied.reporting.sections import over_seeds
from rlinf_embodied.reporting.seeds import seeds_of
from rlinf_embodied.telemetry.plots import COLOURS, rate_lines
from rlinf_embodied.telemetry.run_reader import Run

Curve = Sequence[tuple[float, float]]  # (env steps or updates, held-out success in per cent or else return)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""  # names of cases.py joined by commas; "": all
    seeds: str = UNSEEN
    points: int = 10
    folder: str = "runs/bench_control"
    out: str = ""


def trained(name: str, seed: int, folder: Path, points: int, overrides: Sequence[str]) -> Run:
    """Returns the run of a case; it, and the one that it begins with, are trained now unless `folder` has them.

    Raises:
        ConfigError: the folder has a training with other settings in its place, or the words make no training.
        WorkerError: the training failed; its log is named.
    """
    if CASES[name].source:
        trained(CASES[name].source, seed, folder, points, overrides)
    place, words = place_of(folder, name, seed), words_of(name, seed, folder, overrides)
    every = max(1, compose_train(words).run.num_iterations // points)
    words += [f"eval.every={every}", "eval.record_video=false"]
    return trained_run(f"{name}, seed {seed}", place, words)


def score_of(run: Run) -> str:
    return "success_once" if "success_once" in run.before else "return"


def curve(run: Run) -> Curve:
    """Returns the curve of a run, from its evaluation before to that after."""
    return rate_lines(run, score_of(run), "")[1].points


def table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """Returns median and worst over the seeds, and the interquartile mean with its interval; success in per cent.

    `kept` is how many transitions the replay buffer of the first seed ends with: of HG-DAgger, the human's.
    """
    rows = []
    for name, several in runs.items():
        first, last = ([curve(run)[end][1] for run in several] for end in (0, -1))
        numbers = (statistics.median(first), statistics.median(last), min(last))
        seconds = statistics.median(run.summary["rl_s"] for run in several)
        steps = f"{curve(several[0])[-1][0]:,.0f} {CASES[name].unit}"
        shown = [*(f"{number:.1f}" for number in numbers), over_seeds(several, score_of(several[0]))]
        kept = several[0].metrics[-1].get("rollout/replay_size")
        rows.append((name, steps, *shown, "-" if kept is None else f"{kept:,.0f}", f"{seconds:.0f}"))
    header = (
        "case",
        "after",
        "before, median",
        "after, median",
        "worst",
        "interquartile mean",
        "kept",
        "s of training",
    )
    return Table(header, rows)


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draws a panel for each case: every curve thinly, and the mean of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if len(runs) == 1 else 4.2 * len(runs), 4.0), layout="constrained")
    for axes, (name, several) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        curves = [curve(run) for run in several]
        for points in curves:
            axes.plot(*zip(*points, strict=True), color=COLOURS[0], lw=0.8, alpha=0.4)
        means = [statistics.mean(score for _, score in points) for points in zip(*curves, strict=False)]
        steps = [step for step, _ in curves[0]][: len(means)]
        axes.plot(steps, means, color=COLOURS[0], lw=2, label=f"mean of {len(several)} seeds")
        label = "success, %" if score_of(several[0]) == "success_once" else "return"
        axes.set(xlabel=CASES[name].unit, ylabel=label, title=name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def measure(asked: Asked[Options]) -> Report:
    """Trains case by case; what others begin with comes before them.

    Raises:
        ConfigError: seeds that are no numbers, an unknown case, or a folder of other settings.
    """
    own, runs, found = asked.options, dict[str, list[Run]](), dict[str, list[dict[str, object]]]()
    names, seeds = list(chosen(own.cases, CASES, "cases")), seeds_of(own.seeds, "seeds")
    settings = {name: [*CASES[name].words, *COMMON, *asked.overrides] for name in names}
    lines = []
    for name in names:
        for seed in seeds:
            run = trained(name, seed, Path(own.folder).absolute(), own.points, asked.overrides)
            runs.setdefault(name, []).append(run)
            found.setdefault(name, []).append({"seed": seed, "curve": curve(run), "summary": run.summary})
            lines.append(f"{name}, seed {seed}: {shown(run.before)} -> {shown(run.after)}")
            asked.keep({"settings": settings, "curves": found})
    return Report(
        content={"settings": settings, "curves": found},
        text="\n".join([*lines, "", str(table(runs))]),
        draw=lambda path: draw(runs, path),
    )


BENCHMARK = Benchmark("control", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    BENCHMARK.main()
