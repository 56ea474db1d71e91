"""Learning curves over seeds: of experiments/train_vla.py, of two levels, of SAC compared with Stable-Baselines3's.

python -m experiments.bench.control cases=all [seeds=6201,6202,6203] [points=10] [out=docs/results/control] [folder=...]
python -m experiments.bench.control [seeds=0,1,2] [peer=sb3] [points=10] [out=...]   env.id=HalfCheetah-v5 ...

cases    all, or names of cases.py joined by commas: these trainings, each in one process on one core; overrides come
         after their own words.  What `folder` holds of them already is not trained again, so that a run that was
         interrupted run resumes, and cases can be run one by one.
none     a seed at a time, each in a separate process, ours and then the peer's, so that whatever else the machine
         does disturbs both.  The peer may use every core.

A curve is what greedy held-out episodes give at `points` numbers of env steps (of updates, where nothing acts).  The
peer has the same networks, rates, batches, warm-up, discount and env steps; like ours it gathers
`env.num_envs x env.chunks_per_rollout` steps and then makes as many updates.

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.bench.control import cases
from experiments.bench.control.curves import Curve, draw, seeds_of, trained
from experiments.bench.control.peer import peers
from experiments.bench.harness import Benchmark, Goal, Report, Run, Spread, Table, chosen, ratios
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import SACConfig, TrainConfig
from rlinf_embodied.errors import ConfigError

GOAL, FLOOR = 1.5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""  # names of cases.py joined by commas, or all; "": the training that the overrides say
    seeds: str = ""  # "": 0,1,2; of cases those that no setting was chosen by
    peer: str = ""  # or sb3
    points: int = 10
    folder: str = "runs/bench_control"
    out: str = ""

    @property
    def each_seed(self) -> list[int]:
        """The seeds; see `seeds_of`."""
        return seeds_of(self.seeds or (cases.UNSEEN if self.cases else "0,1,2"))


def measure_cases(run: Run[Options]) -> Report:
    """Trains case by case; what others begin with comes before them."""
    own, curves = run.options, dict[str, list[Curve]]()
    if own.peer:
        raise ConfigError(f"cases is {own.cases!r}, but a peer is compared with one training: leave peer out")
    names = list(cases.CASES if own.cases == "all" else chosen(own.cases, cases.CASES, "cases"))
    settings = {name: [*cases.CASES[name].words, *cases.COMMON, *run.overrides] for name in names}
    for name in names:
        for seed in own.each_seed:
            found = cases.case_curve(name, seed, Path(own.folder).absolute(), own.points, run.overrides)
            curves.setdefault(name, []).append(found)
            run.keep({"settings": settings, "curves": _plain(curves)})
    each = [cases.said(name, curve) for name, several in curves.items() for curve in several]
    return Report(
        content={"settings": settings, "curves": _plain(curves)},
        text="\n".join([*each, "", str(cases.table(curves))]),
        draw=lambda path: cases.draw(curves, path),
    )


def _plain(curves: Mapping[str, Sequence[Curve]]) -> dict[str, list[dict]]:
    return {name: [asdict(curve) for curve in several] for name, several in curves.items()}


def measure_one(run: Run[Options], config: TrainConfig) -> Report:
    """Trains seed by seed."""
    own, curves = run.options, {name: list[Curve]() for name in ("ours", run.options.peer) if name}
    for seed in own.each_seed:
        folder = Path(own.folder).absolute() / f"seed_{seed}_{time.strftime('%Y%m%d_%H%M%S')}"
        curves["ours"].append(trained(run.overrides, seed, folder, own.points))
        if own.peer:
            curves[own.peer].append(peers(config, seed, own.points))
        run.keep({"curves": _plain(curves)})
    goals = []
    if own.peer:
        measured = [[curve.steps_per_s for curve in curves[name]] for name in ("ours", own.peer)]
        goals = [Goal("env steps/s, ours / SB3", ratios(*measured), GOAL, floor=FLOOR)]
    rows = [
        (
            name,
            f"{Spread.of(curve.returns[0] for curve in several):.1f}",
            f"{Spread.of(curve.last for curve in several):.1f}",
            f"{Spread.of(curve.steps_per_s for curve in several):.0f}",
        )
        for name, several in curves.items()
    ]
    unit = "env steps" if config.algorithm.acts else "updates"
    title = f"{config.env.task}, {config.algorithm.name}"
    header = (title, "return before", f"after {curves['ours'][0].steps[-1]} {unit}", f"{unit}/s")
    return Report(
        content={"curves": curves, "goals": goals},
        text="\n\n".join([str(Table(header, rows)), *map(str, goals)]),
        draw=lambda path: draw({title: curves}, unit, path),
    )


def measure(run: Run[Options]) -> Report:
    """Measures what the arguments ask for.

    Raises:
        ConfigError: seeds that are no numbers, an unknown case or peer, or a peer of another algorithm than SAC.
    """
    own = run.options
    if own.cases:
        return measure_cases(run)
    config, _ = compose_train(run.overrides), own.each_seed
    if own.peer not in ("", "sb3"):
        raise ConfigError(f"peer is {own.peer!r}, but there is sb3 only: use peer=sb3, or leave it out")
    if own.peer and not (isinstance(config.algorithm, SACConfig) and config.algorithm.num_critics == 2):
        raise ConfigError(f"peer is {own.peer!r}, but its SAC is plain: use algorithm=sac, or leave peer out")
    return measure_one(run, config)


BENCHMARK = Benchmark("control", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
