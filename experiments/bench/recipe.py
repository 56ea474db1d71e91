"""The demo's recipe on seeds that tuning never saw, each from nothing: how good, how sure, how long.

python -m experiments.bench.recipe [seeds=1000-1009] [episodes=300] [side_by_side=2] [recipe=pick] [out=...] [overrides]

For every seed the whole of train_vla.py runs with an empty cache (in the folder `keep=` another recipe of the same seed
finds its clone again): demonstrations, cloning, evaluation, RL to its goal, evaluation.  `side_by_side` runs share the
machine, each in one process on one core; 1 gives every run the whole machine, as `make demo` has it (weights do not
depend on that).  Recipes: pick (the demo), region (demonstrations of a part of the table only), grpo (success as the
only reward, from the clones of region), clone (no RL).  `demos=60,120,240` runs the recipe with each of these numbers
of demonstrations, with as many optimizer steps as with the default one, and draws a picture beside `out`.

Printed and written: success_once and success_at_end before and after with 95 % intervals, env steps, minutes of warm
start and RL, core-minutes of the whole; worst, median and best over the seeds; the processor.  `table=<an earlier out>`
prints the tables of earlier results and runs nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench.harness import Benchmark, Report, Run, Table, commands
from rlinf_embodied.cluster.hardware import num_cores
from rlinf_embodied.config import WarmStartConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import wilson

TRAIN = Path(__file__).resolve().parents[1] / "train_vla.py"
RECIPES: dict[str, list[str]] = {
    "pick": ["env=maniskill_pick", "algorithm=ppo_small_steps", "run=demo"],
    "region": ["env=maniskill_pick", "run.num_iterations=40", "warm_start.region=[0.03,1,0.03,1]"],
    "grpo": ["env=maniskill_pick", "algorithm=grpo", "run.num_iterations=40", "warm_start.region=[0.03,1,0.03,1]"],
    "clone": ["env=maniskill_pick", "run.num_iterations=0"],
}
HEADER = ["seed", "once before", "once after", "at_end before", "at_end after", "env steps", "warm start", "RL", "all"]
KEYS = ("success_once", "success_at_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    seeds: str = "1000-1009"
    episodes: int = 300
    side_by_side: int = 2
    recipe: str = "pick"
    demos: str = ""  # numbers of demonstrations; "": the default
    out: str = ""
    keep: str = ""  # folder for run folders and clones; "": they are thrown away
    table: str = ""  # an earlier out=<file>: print its table, run nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed gave."""

    seed: int
    before: Mapping[str, Any]  # evaluation summaries
    after: Mapping[str, Any]
    env_steps: int
    iterations: int
    warm_start_min: float
    rl_min: float
    checks_min: float
    core_min: float  # processor time of the whole command
    weights_sha256: str
    num_demos: int

    def failures(self, key: str) -> tuple[int, int]:
        """Returns how many episodes did not have `key` before and after."""
        count = lambda summary: round((1 - summary[key]) * summary["num_episodes"])  # noqa: E731
        return count(self.before), count(self.after)


def seeds_of(text: str) -> list[int]:
    """Returns the seeds of a list such as "0,3" or "1000-1009".

    Raises:
        ConfigError: it is neither.
    """
    try:
        if "-" in text:
            first, last = (int(part) for part in text.split("-"))
            return list(range(first, last + 1))
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds is {text!r}, but it is a list or a range: use 0,3 or 1000-1009") from None


def command(
    recipe: str, seed: int, folder: Path, episodes: int, core: int | None, overrides: Sequence[str]
) -> list[str]:
    """Returns the command line of one run; `core`: it shares the machine and has that core for itself."""
    own = [f"run.seed={seed}", f"run.dir={folder}", f"eval.num_episodes={episodes}", "eval.record_video=false"]
    alone = [] if core is None else ["cluster=serial", "plan=collocated"]
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    script = [sys.executable, str(TRAIN)]
    return [*pinned, *script, *RECIPES[recipe], *own, *alone, "checkpoint.every=0", *overrides]


class SeedRun:
    """One seed's training as a child process with a cache of its own."""

    def __init__(self, words: Sequence[str], folder: Path, seed: int, num_demos: int, cache: Path) -> None:
        """Starts it; what it prints goes to a log in its folder."""
        self.seed, self.folder, self._num_demos = seed, folder, num_demos
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's; it would be resumed
        folder.mkdir(parents=True)
        self._log = (folder / "log.txt").open("w")
        environment = {**os.environ, "RLINF_EMBODIED_CACHE": str(cache)}
        self._process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT, env=environment)

    def finished(self) -> Outcome | None:
        """Returns the outcome once the run has ended.

        Raises:
            ConfigError: it failed.
        """
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._log.close()
        if self._process.returncode:
            tail = (self.folder / "log.txt").read_text()[-2000:]
            raise ConfigError(f"the run of seed {self.seed} ended with exit code {self._process.returncode}:\n{tail}")
        summary = json.loads((self.folder / "summary.json").read_text())
        return outcome_of(self.seed, summary, (usage.ru_utime + usage.ru_stime) / 60, self._num_demos)

    def stop(self) -> None:
        """Ends a run that nobody waits for any more."""
        if self._process.returncode is None:
            self._process.terminate()
            self._process.wait()
        self._log.close()


def outcome_of(seed: int, summary: Mapping[str, Any], core_min: float, num_demos: int) -> Outcome:
    """Returns what a run's summary.json says."""
    return Outcome(
        seed,
        summary["before"],
        summary["after"],
        summary["env_steps"],
        summary["iterations"],
        summary["startup_s"]["warm start"] / 60,
        summary["rl_s"] / 60,
        summary["checks_s"] / 60,
        core_min,
        summary["weights_sha256"],
        num_demos,
    )


def with_demos(number: int) -> list[str]:
    """Returns the overrides for a number of demonstrations: epochs such that as many minibatches are seen as ever."""
    usual = WarmStartConfig()
    epochs = {name: round(getattr(usual, name) * usual.num_demos / number) for name in ("epochs", "head_epochs")}
    return [f"warm_start.num_demos={number}", *(f"warm_start.{name}={max(1, value)}" for name, value in epochs.items())]


def run_all(own: Options, overrides: Sequence[str], keep: Callable[[Sequence[Outcome]], None]) -> list[Outcome]:
    """Runs every seed and returns the outcomes in the order of the seeds; `keep` gets those so far after each run."""
    usual, shared = WarmStartConfig().num_demos, own.side_by_side > 1
    numbers = seeds_of(own.demos) if own.demos else [usual]
    waiting = [(number, seed) for seed in seeds_of(own.seeds) for number in numbers]
    root = Path(own.keep or tempfile.mkdtemp(prefix="recipe-"))
    cores = list(range(num_cores()))[: own.side_by_side]
    if shared and len(cores) < own.side_by_side:
        raise ConfigError(f"side_by_side is {own.side_by_side}, but there are {num_cores()} cores: use fewer")

    def started(number: int, seed: int, core: int) -> SeedRun:
        folder = root / (f"{own.recipe}-{seed}" + ("" if number == usual else f"-{number}"))
        mine = [*([] if number == usual else with_demos(number)), *overrides]
        words = command(own.recipe, seed, folder, own.episodes, core if shared else None, mine)
        return SeedRun(words, folder, seed, number, root / f"cache-{seed}")

    running: dict[int, SeedRun] = {}
    done: list[Outcome] = []
    try:
        while waiting or running:
            for core in cores:
                if core not in running and waiting:
                    running[core] = started(*waiting.pop(0), core)
            for core, run in list(running.items()):
                if (outcome := run.finished()) is not None:
                    del running[core]
                    done.append(outcome)
                    print(f"{outcome.num_demos} demonstrations | " + " | ".join(cells(outcome)), flush=True)
                    keep(done)
            time.sleep(1.0)
    finally:
        for run in running.values():
            run.stop()
        if not own.keep:
            shutil.rmtree(root)
    return in_order(done)


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Returns the outcomes by number of demonstrations and seed."""
    return sorted(outcomes, key=lambda outcome: (outcome.num_demos, outcome.seed))


def _percent(share: float, low: float, high: float) -> str:
    return f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def cells(outcome: Outcome) -> list[str]:
    """Returns a row of the table."""
    both = (outcome.before, outcome.after)
    shown = [_percent(summary[key], *summary[f"{key}_interval"]) for key in KEYS for summary in both]
    minutes = [f"{value:.1f} min" for value in (outcome.warm_start_min, outcome.rl_min)]
    return [str(outcome.seed), *shown, f"{outcome.env_steps:,}", *minutes, f"{outcome.core_min:.1f} core-min"]


def overview(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Returns worst, median and best over the seeds, and all episodes together."""
    columns = [(key, [getattr(o, when) for o in outcomes]) for key in KEYS for when in ("before", "after")]
    rows = []
    for name, choose in (("worst", min), ("median", statistics.median), ("best", max)):
        values = [f"{100 * choose(summary[key] for summary in column):.1f} %" for key, column in columns]
        backwards = {"worst": max, "best": min}.get(name, statistics.median)
        steps = f"{int(backwards(o.env_steps for o in outcomes)):,}"
        minutes = [f"{backwards(getattr(o, key) for o in outcomes):.1f} min" for key in ("warm_start_min", "rl_min")]
        rows.append([name, *values, steps, *minutes, f"{backwards(o.core_min for o in outcomes):.1f} core-min"])
    together = []
    for key, column in columns:
        number = sum(summary["num_episodes"] for summary in column)
        solved = sum(round(summary[key] * summary["num_episodes"]) for summary in column)
        together.append(_percent(solved / number, *wilson(solved, number)))
    return [*rows, ["all episodes", *together, f"{sum(o.env_steps for o in outcomes):,}", "", "", ""]]


def verdicts(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns what the seeds say about the goals, in sentences."""
    once = [o.after["success_once"] for o in outcomes]
    gap = max(o.after["success_once"] - o.after["success_at_end"] for o in outcomes)
    halved = sum(2 * after <= before for before, after in (o.failures("success_once") for o in outcomes))
    lasting = sum(2 * after <= before for before, after in (o.failures("success_at_end") for o in outcomes))
    gains = [100 * (o.after["success_at_end"] - o.before["success_at_end"]) for o in outcomes]
    return [
        f"success_once after: worst {100 * min(once):.1f} %, median {100 * statistics.median(once):.1f} %",
        f"success_at_end at most {100 * gap:.1f} points below success_once",
        f"failures of the clone at least halved in {halved} of {len(outcomes)} seeds (success_once), {lasting} "
        "(success_at_end)",
        f"gain in success_at_end: {min(gains):+.1f} to {max(gains):+.1f} points",
        f"minutes of RL: {min(o.rl_min for o in outcomes):.1f} to {max(o.rl_min for o in outcomes):.1f}",
    ]


def page(found: Mapping[str, Any]) -> str:
    """Returns the results of an out=<file> as Markdown."""
    where, outcomes = found["machine"], [Outcome(**row) for row in found["outcomes"]]
    lines = [
        f"{where['processor']}, {where['cores']} cores, {where['date'][:10]}; greedy, held-out initial states, 95 % "
        "Wilson intervals.",
        "",
        *(line for part in by_demos(outcomes).values() for line in _section(part)),
        commands("recipe", found),
    ]
    return "\n".join(lines)


def by_demos(outcomes: Sequence[Outcome]) -> dict[int, list[Outcome]]:
    """Returns the outcomes by their number of demonstrations, ascending."""
    numbers = sorted({outcome.num_demos for outcome in outcomes})
    return {number: [o for o in outcomes if o.num_demos == number] for number in numbers}


def _section(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [*(cells(o) for o in outcomes), *overview(outcomes)]
    said = [f"- {text}" for text in verdicts(outcomes)]
    return [f"{outcomes[0].num_demos} demonstrations:", "", Table(HEADER, rows).markdown(), "", *said, ""]


def draw(outcomes: Sequence[Outcome], target: Path) -> None:
    """Draws success over the number of demonstrations: a dot per seed, a line through the medians."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0))
    axes = figure.add_subplot()
    for key, colour, shift in zip(KEYS, ("#1f5f8b", "#b4552d"), (-2, 2), strict=True):
        groups = by_demos(outcomes)
        values = {number: [100 * o.before[key] for o in part] for number, part in groups.items()}
        for number, shares in values.items():
            axes.plot([number + shift] * len(shares), shares, ".", color=colour, alpha=0.6)
        axes.plot(list(values), [statistics.median(v) for v in values.values()], color=colour, label=key)
    axes.set(xlabel="demonstrations", ylabel="success of the clone, greedy, %", ylim=(0, 103))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def measure(run: Run[Options]) -> Report:
    """Runs every seed, or shows an earlier table."""
    own = run.options
    if own.table:
        found = json.loads(Path(own.table).read_text())
        return Report(content=found, text=page(found))
    if own.recipe not in RECIPES:
        raise ConfigError(f"recipe is {own.recipe!r}, but there are {', '.join(RECIPES)}: use one of these")

    def content(outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return {"outcomes": [asdict(outcome) for outcome in outcomes]}

    outcomes = run_all(own, run.overrides, lambda done: run.keep(content(in_order(done))))
    picture = partial(draw, outcomes) if own.demos else None
    found = content(outcomes)
    return Report(content=found, text=page({**run.known, **found}), draw=picture)


BENCHMARK = Benchmark("recipe", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
