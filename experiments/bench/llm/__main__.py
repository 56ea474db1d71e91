"""GRPO on arithmetic: our trainer compared with TRL's GRPOTrainer and with a no-framework baseline.

python -m experiments.bench.llm [arms=trl_1,bare_1,ours_1] [steps=40] [skip=5] [rounds=3] [start_steps=1600]
                                [tests=1000] [out=docs/results/llm] [folder=runs/bench_llm] [work as in work.py]

The arms alternate, each a new process bound to one core that writes steps.jsonl and model/.  They start from the same
model and use the same prompts; the number of the round is the seed of sampling.  Tokens are those of completions, and a
second is one of the whole step.  Writes <out>.json and <out>.md.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from experiments.bench.harness import (
    ONE_THREAD,
    Benchmark,
    Child,
    Goal,
    Report,
    Run,
    Spread,
    Table,
    alternate,
    chosen,
    command_text,
    ratios,
)
from experiments.bench.llm.trl_peer import require_trl
from experiments.bench.llm.work import Step, Work, greedy_accuracy, make_start, read_steps
from rlinf_embodied.config.checks import require

HEADER = ("arm", "tokens/s", "s per step", "tokens per step", "accuracy")

ARMS = {  # module, and what it does
    "trl_1": ("trl_peer", "TRL, one process, one thread"),
    "bare_1": ("bare", "the no-framework baseline, one process, one thread"),
    "ours_1": ("ours", "ours, one device"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of an arm, over its steady part."""

    tokens_per_s: float
    s_per_step: float
    tokens_per_step: float
    accuracy: float  # greedy, after the last step


Runs = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Work):
    """The arguments."""

    start_steps: int = 1600
    arms: str = ""
    steps: int = 40
    skip: int = 5
    rounds: int = 3
    tests: int = 1000
    folder: str = "runs/bench_llm"
    out: str = ""


def run_arm(name: str, work: Work, steps: int, folder: Path) -> None:
    """Runs an arm to its end in `folder`.

    Raises:
        ConfigError: it cannot be started.
        WorkerError: it failed.
    """
    module, what = ARMS[name]
    folder.mkdir(parents=True)
    env = {**dict.fromkeys(ONE_THREAD, "1"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    bound = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-m"]
    command = [f"experiments.bench.llm.{module}", *work.arguments(), f"steps={steps}", f"out={folder}"]
    Child(what, [*bound, *command], folder / "log.txt", env).wait()


def measured(steps: Sequence[Step], skipped: int, accuracy: float) -> Measured:
    """Returns what a run came to after its first `skipped` steps.

    Raises:
        ConfigError: no steps are left.
    """
    timed = steps[skipped:]
    rule = f"there are {len(steps)} steps, and one is timed from the end of the one before"
    require(bool(timed) and skipped >= 1, "skip", skipped, rule, "skip at least one, and fewer than steps")
    seconds, tokens = timed[-1].at - steps[skipped - 1].at, sum(step.tokens for step in timed)
    return Measured(tokens / seconds, seconds / len(timed), tokens / len(timed), accuracy)


def run_arms(own: Options, names: Iterable[str]) -> Runs:
    """Runs every arm once per round, one after the other."""
    folder = Path(own.folder).resolve() / time.strftime("%Y%m%d_%H%M%S")

    def one(name: str, numbers: Iterator[int]) -> Measured:
        number = next(numbers)
        place = folder / f"{name}_{number}"
        run_arm(name, replace(own, seed=own.seed + number), own.steps, place)
        return measured(read_steps(place), own.skip, greedy_accuracy(place / "model", own, own.tests))

    return alternate({name: partial(one, name, count()) for name in names}, own.rounds)


# --------------------------------------------------------------------------------------------------------------- report
def row(name: str, runs: Sequence[Measured]) -> tuple[str, ...]:
    """Returns a line of the table: medians, and the spread of what is compared."""
    spread = lambda key: Spread.of(getattr(run, key) for run in runs)  # noqa: E731
    return (
        name,
        f"{spread('tokens_per_s'):,.0f}",
        f"{spread('s_per_step').median:.3f}",
        f"{spread('tokens_per_step').median:,.0f}",
        f"{spread('accuracy'):.3f}",
    )


def goals(found: Runs) -> list[Goal]:
    """Returns what our arm should reach against TRL and the baseline on one core."""
    wanted, ours = [], "ours_1"
    if found.get(ours) and found.get("trl_1"):
        wanted += [
            Goal("ours_1 / trl_1, tokens/s", _quotients(found, ours, "trl_1", "tokens_per_s"), 1.5, 1.15),
            Goal("ours_1 / trl_1, accuracy", _quotients(found, ours, "trl_1", "accuracy"), 1.0),
        ]
    if found.get(ours) and found.get("bare_1"):
        wanted.append(Goal("ours_1 / bare_1, tokens/s", _quotients(found, ours, "bare_1", "tokens_per_s"), 0.9))
    return wanted


def _quotients(found: Runs, above: str, below: str, name: str) -> Spread:
    return ratios([getattr(run, name) for run in found[above]], [getattr(run, name) for run in found[below]])


def report(run: Run[Options], found: Runs) -> Report:
    """Returns table, goals and arms."""
    own, reached = run.options, goals(found)
    table = Table(HEADER, [row(name, runs) for name, runs in found.items()]).markdown()
    page = [
        "# GRPO compared with TRL and a no-framework baseline",
        f"{command_text(run.known)}: {own.prompts} prompts x {own.group} completions, "
        f"{own.new_tokens} tokens at most, level {own.level}, lr {own.lr:g}, {own.steps} steps of which "
        f"the first {own.skip} are not timed, {own.rounds} rounds. Medians (smallest - largest).",
        table,
        "\n".join(f"- {goal}" for goal in reached),
        "\n".join(f"- {name}: {ARMS[name][1]}" for name in found),
    ]
    return Report(
        content={"work": asdict(Work.of(own)), "arms": found, "goals": reached},
        text="\n".join([table, *map(str, reached)]),
        markdown="\n\n".join(filter(None, page)),
    )


def measure(run: Run[Options]) -> Report:
    """Makes the start and runs the arms."""
    own = run.options
    arms = chosen(own.arms, ARMS, "arms")
    if any(name.startswith("trl") for name in arms):
        require_trl()
    make_start(own, own.start_steps)
    return report(run, run_arms(own, arms))


BENCHMARK = Benchmark("llm", Options, measure)

if __name__ == "__main__":
    BENCHMARK.main()
