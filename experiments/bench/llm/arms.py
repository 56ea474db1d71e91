"""The arms: how each is started, on which cores, and how its results are read.

One arm runs at a time, as a new process (with those that it starts) bound to its cores.  It writes steps.jsonl, model/.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.harness import ONE_THREAD, Child
from experiments.bench.llm.work import Work
from rlinf_embodied.errors import ConfigError

SHARES = ("generation_s", "reward_s", "scoring_s", "forward_backward_s", "optimizer_s")


@dataclass(frozen=True, slots=True)
class Step:
    """What was done in one step."""

    at: float  # seconds on a clock of this machine, at the end of the step
    tokens: int  # generated
    parts: dict[str, float]  # seconds by phase


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of an arm, over its steady part."""

    tokens_per_s: float
    s_per_step: float
    tokens_per_step: float
    shares: dict[str, float]  # of a step's time, by phase
    accuracy: float  # greedy, after the last step


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to do the work."""

    what: str
    cores: int
    command: Callable[[Work, int, Path], list[str]]  # (work, steps, folder)


def _module(name: str, **settings: object) -> Callable[[Work, int, Path], list[str]]:
    own = [f"{key}={value}" for key, value in settings.items()]
    words = ["-m", f"experiments.bench.llm.{name}"]
    return lambda work, steps, out: [*words, *work.arguments(), f"steps={steps}", f"out={out}", *own]


ARMS = {
    "trl_1": Arm("TRL, one process, one thread", 1, _module("trl_peer")),
    "bare_1": Arm("the no-framework baseline, one process, one thread", 1, _module("bare")),
    "ours_1": Arm("ours, one device", 1, _module("ours", devices=1)),
    "ours_2": Arm("ours, two devices, plan=auto", 2, _module("ours", devices=2)),
}


def run_arm(arm: Arm, work: Work, steps: int, folder: Path) -> None:
    """Runs an arm to its end in `folder`.

    Raises:
        ConfigError: the machine has too few cores, or the arm cannot be started.
        WorkerError: it failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < arm.cores:
        raise ConfigError(f"{arm.what} needs {arm.cores} cores, but there are {len(cores)}: leave it out of arms")
    folder.mkdir(parents=True)
    env = {**dict.fromkeys(ONE_THREAD, "1"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    bound = ["taskset", "-c", ",".join(map(str, cores[: arm.cores])), sys.executable]
    Child(arm.what, [*bound, *arm.command(work, steps, folder)], folder / "log.txt", env).wait()


# ----------------------------------------------------------------------------------------------------------------- read
def read_steps(folder: Path) -> list[Step]:
    """Returns the steps that an arm left."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Step(line.pop("at"), line.pop("tokens"), line) for line in lines]


def measured(steps: Sequence[Step], skipped: int, accuracy: float) -> Measured:
    """Returns what a run came to after its first `skipped` steps.

    Raises:
        ConfigError: no steps are left.
    """
    timed = steps[skipped:]
    if not timed or skipped < 1:
        raise ConfigError(
            f"skip is {skipped} of {len(steps)} steps, but the time of a step is counted from the end of the one "
            "before: skip at least one, and fewer than steps"
        )
    seconds, tokens = timed[-1].at - steps[skipped - 1].at, sum(step.tokens for step in timed)
    known = {name: sum(step.parts.get(name, 0.0) for step in timed) / seconds for name in SHARES}
    shares = {name.removesuffix("_s"): share for name, share in known.items()} | {"other": 1 - sum(known.values())}
    return Measured(tokens / seconds, seconds / len(timed), tokens / len(timed), shares, accuracy)
