"""GRPO on arithmetic: our trainer compared with TRL's GRPOTrainer and with a no-framework baseline.

python -m experiments.bench.llm [arms=trl_1,bare_1,ours_1,trl_2,ours_2]
                                [steps=40] [skip=5] [rounds=3] [start_steps=1600]
                                [tests=1000] [out=docs/results/llm] [folder=runs/bench_llm] [work as in work.py]

The arms alternate, each in a new process that is bound to one core, or to two if its name ends in _2: TRL has two
threads, ours two workers.  They start from the same model and use the same prompts; the number of the round is the
seed of sampling.  Tokens are those of completions, and a second is one of the whole step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from experiments.bench.harness import Benchmark, Goal, Run, Spread, alternate, chosen, ratios, table
from experiments.bench.llm import bare, ours, trl_peer
from experiments.bench.llm.work import Step, Work, greedy_accuracy, make_start
from rlinf_embodied.config.checks import require

HEADER = ("arm", "tokens/s", "s per step", "processor s", "tokens per step", "accuracy")
GOALS = (  # ours / peer
    ("ours_1", "trl_1", "tokens_per_s", 1.5),
    ("ours_1", "trl_1", "accuracy", 1.0),
    ("ours_1", "bare_1", "tokens_per_s", 0.9),
    ("ours_2", "trl_2", "tokens_per_s", 2.5),
    ("ours_2", "trl_2", "accuracy", 1.0),
)
ARMS = {
    "trl_1": trl_peer.train,
    "bare_1": bare.train,
    "ours_1": ours.train,
    "trl_2": partial(trl_peer.train, cores=2),
    "ours_2": partial(ours.train, cores=2),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of an arm, over its steady part."""

    tokens_per_s: float
    s_per_step: float
    processor_s: float  # per step, of the arm's own process: without Ray's workers
    tokens_per_step: float
    accuracy: float  # greedy, after the last step


Runs = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Work):
    """The arguments."""

    start_steps: int = 1600
    arms: str = ""
    skip: int = 5
    rounds: int = 3
    tests: int = 1000
    folder: str = "runs/bench_llm"
    out: str = ""


def run_arm(name: str, work: Work, out: Path) -> list[Step]:
    """Runs an arm to its end in a new process on as many cores as its name says.

    Raises:
        ConfigError: there are fewer cores.
    """
    cores, number = sorted(os.sched_getaffinity(0)), int(name[-1])
    require(number <= len(cores), "arms", name, f"there are {len(cores)} cores", "leave it out")
    with ProcessPoolExecutor(1, get_context("spawn"), os.sched_setaffinity, (0, cores[:number])) as process:
        return process.submit(ARMS[name], work, out).result()


def measured(steps: Sequence[Step], skipped: int, accuracy: float) -> Measured:
    """Returns what a run came to after its first `skipped` steps.

    Raises:
        ConfigError: no steps are left.
    """
    timed = steps[skipped:]
    rule = f"there are {len(steps)} steps, and one is timed from the end of the one before"
    require(bool(timed) and skipped >= 1, "skip", skipped, rule, "skip at least one, and fewer than steps")
    first, last, count = steps[skipped - 1], timed[-1], len(timed)
    seconds, tokens = last.at - first.at, sum(step.tokens for step in timed)
    return Measured(tokens / seconds, seconds / count, (last.busy - first.busy) / count, tokens / count, accuracy)


def run_arms(own: Options, work: Work, names: Iterable[str]) -> Runs:
    """Runs every arm once per round, one after the other."""
    folder = Path(own.folder).resolve() / time.strftime("%Y%m%d_%H%M%S")

    def one(name: str, numbers: Iterator[int]) -> Measured:
        number = next(numbers)
        place = folder / f"{name}_{number}"
        steps = run_arm(name, replace(work, seed=work.seed + number), place)
        return measured(steps, own.skip, greedy_accuracy(place / "model", work, own.tests))

    return alternate({name: partial(one, name, count()) for name in names}, own.rounds)


# --------------------------------------------------------------------------------------------------------------- report
def row(name: str, runs: Sequence[Measured]) -> tuple[str, ...]:
    """Returns a line of the table: medians, and the spread of what is compared."""
    spread = lambda key: Spread.of(_values(runs, key))  # noqa: E731
    return (
        name,
        f"{spread('tokens_per_s'):,.0f}",
        f"{spread('s_per_step').median:.3f}",
        f"{spread('processor_s'):.3f}",
        f"{spread('tokens_per_step').median:,.0f}",
        f"{spread('accuracy'):.3f}",
    )


def goals(found: Runs) -> list[Goal]:
    """Returns what our arms should reach against TRL and the baseline on as many cores."""
    return [
        Goal(f"{arm} / {peer}, {name}", ratios(*(_values(found[one], name) for one in (arm, peer))), goal)
        for arm, peer, name, goal in GOALS
        if {arm, peer} <= found.keys()
    ]


def _values(runs: Sequence[Measured], name: str) -> list[float]:
    return [getattr(run, name) for run in runs]


def measure(run: Run[Options]) -> None:
    own = run.options
    arms = chosen(own.arms, ARMS, "arms")
    if any(name.startswith("trl") for name in arms):
        trl_peer.require_trl()
    work = Work(**{entry.name: getattr(own, entry.name) for entry in fields(Work)})  # other processes import its class
    make_start(work, own.start_steps)
    found = run_arms(own, work, arms)
    reached = goals(found)
    print(table(HEADER, [row(name, runs) for name, runs in found.items()]), *reached, sep="\n")
    run.write({"work": work, "arms": found, "goals": reached})


BENCHMARK = Benchmark("llm", Options, measure)

if __name__ == "__main__":
    BENCHMARK.main()
