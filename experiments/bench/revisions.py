"""Two revisions of this repository: the same training in both, alternating on one machine.

python -m experiments.bench.revisions old=<checkout> [command=train_vla] [metric=charts/SPS] [rounds=3] [skip=1]
                                      [out=...] env=point_reach run.num_iterations=4 ... (words of the command)

`metric` is read from metrics.jsonl, of the iterations after the first `skip`: charts/SPS are env steps per second,
charts/tokens_per_s tokens per second (command=train_llm_math), time/iteration_s seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from experiments.bench.harness import REPOSITORY, Benchmark, Child, Goal, Report, Run, Spread, Table, alternate, ratios
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import read_metrics

GOAL, FLOOR = 1.0, 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    old: str = ""
    command: str = "train_vla"
    metric: str = "charts/SPS"
    rounds: int = 3
    skip: int = 1
    out: str = ""


def trained(checkout: Path, own: Options, words: Sequence[str], folder: Path) -> float:
    """Returns the mean of the metric over the iterations that count.

    Raises:
        ConfigError: no iteration counts, or the metric is unknown.
        WorkerError: the training failed; its log is named.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, f"experiments/{own.command}.py", *words, f"run.dir={folder / 'run'}"]
    environment = {"PYTHONPATH": str(checkout)}
    Child(str(checkout), command, folder / "log.txt", environment, cwd=checkout).wait()
    rows = read_metrics(folder / "run")[own.skip :]
    found = [float(row[own.metric]) for row in rows if own.metric in row]
    if not found:
        known = ", ".join(sorted(rows[-1])) if rows else f"none after {own.skip} iterations"
        raise ConfigError(f"metric is {own.metric!r}, but the run has {known}: use one of these, or a smaller skip")
    return sum(found) / len(found)


def measure(run: Run[Options]) -> Report:
    """Trains in both checkouts, round by round.

    Raises:
        ConfigError: `old` is no checkout of this repository.
    """
    own = run.options
    old = Path(own.old).absolute()
    if not (old / "experiments").is_dir() or old == REPOSITORY:
        raise ConfigError(f"old is {own.old!r}, but it must be another checkout of this repository: git worktree add")
    with tempfile.TemporaryDirectory(prefix="revisions-") as place:
        numbers = count()
        one = lambda checkout: trained(checkout, own, run.overrides, Path(place) / str(next(numbers)))  # noqa: E731
        found = alternate({"old": partial(one, old), "new": partial(one, REPOSITORY)}, own.rounds)
    goal = Goal(f"{own.metric}, new / old", ratios(found["new"], found["old"]), GOAL, floor=FLOOR)
    rows = [(name, f"{Spread.of(values):.4g}") for name, values in found.items()]
    table = Table(("revision", f"{own.metric}, median (min-max)"), rows)
    return Report(content={"found": found, "goals": [goal]}, text=f"{table}\n\n{goal}")


BENCHMARK = Benchmark("revisions", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
