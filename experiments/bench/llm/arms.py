"""The arms: how each is started, on which cores, and what is read from the folder that it leaves.

One at a time; an arm is a fresh process (with those that it starts) bound to its cores, and is watched from outside:

    benchmark -- starts --> arm -- starts --> ranks or workers
         |                                          |
         +---- memory of them all, twice a second --+        steps-<rank>.jsonl, model/
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.bench.harness import ONE_THREAD, Child
from experiments.bench.llm.work import Work
from rlinf_embodied.errors import ConfigError

MEMORY_EVERY_S = 0.5
SHARES = ("generation_s", "reward_s", "scoring_s", "forward_backward_s", "optimizer_s")


@dataclass(frozen=True, slots=True)
class Step:
    """What one process did in one step."""

    at: float  # seconds on a clock of this machine, at the end of the step
    cpu_s: float  # processor seconds of the process so far
    tokens: int  # generated
    parts: dict[str, float]  # seconds by phase


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of an arm; all over its steady part, but for memory."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    s_per_step: float
    tokens_per_step: float
    peak_mb: float  # of all its processes together, pages shared among them counted once
    shares: dict[str, float]  # of a step's time, by phase; of the first process
    accuracy: float  # greedy, after the last step


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to do the work."""

    what: str
    cores: int
    threads: int  # of each process
    command: Callable[[Work, int, Path], list[str]]  # (work, steps, folder)


def _module(name: str, **settings: object) -> Callable[[Work, int, Path], list[str]]:
    own = [f"{key}={value}" for key, value in settings.items()]
    words = ["-m", f"experiments.bench.llm.{name}"]
    return lambda work, steps, out: [*words, *work.arguments(), f"steps={steps}", f"out={out}", *own]


ARMS = {
    "trl_1": Arm("TRL, one process, one thread", 1, 1, _module("trl_peer")),
    "bare_1": Arm("the no-framework baseline, one process, one thread", 1, 1, _module("bare")),
    "ours_1": Arm("ours, one device", 1, 1, _module("ours", devices=1)),
    "trl_2_processes": Arm("TRL, two processes of one thread", 2, 1, _module("trl_peer", processes=2, microbatches=4)),
    "trl_2_threads": Arm("TRL, one process of two threads", 2, 2, _module("trl_peer", threads=2)),
    "bare_2": Arm("the no-framework baseline, two processes of one thread", 2, 1, _module("bare", processes=2)),
    "ours_2": Arm("ours, two devices, plan=auto", 2, 1, _module("ours", devices=2)),
}


def run_arm(arm: Arm, work: Work, steps: int, folder: Path) -> float:
    """Runs an arm to its end in `folder` and returns its peak memory, MB.

    Raises:
        ConfigError: the machine has too few cores, or the arm cannot be started.
        WorkerError: it failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < arm.cores:
        raise ConfigError(f"{arm.what} needs {arm.cores} cores, but there are {len(cores)}: leave it out of arms")
    folder.mkdir(parents=True)
    env = {**dict.fromkeys(ONE_THREAD, str(arm.threads)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    bound = ["taskset", "-c", ",".join(map(str, cores[: arm.cores])), sys.executable]
    child = Child(arm.what, [*bound, *arm.command(work, steps, folder)], folder / "log.txt", env)
    with Memory(child.process.pid) as memory:
        child.wait()
    return memory.peak_bytes / 1e6


class Memory:
    """Watches the memory of a process and of all that descend from it; a context manager."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        """Begins to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, proportional_memory(self._pid))


def proportional_memory(pid: int) -> int:
    """Returns bytes of a process and its descendants; a page that n processes share counts 1 / n in each."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in tree:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


# ----------------------------------------------------------------------------------------------------------------- read
def read_steps(folder: Path) -> list[list[Step]]:
    """Returns the steps of each process that left a log."""
    ranks = []
    for path in sorted(folder.glob("steps-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ranks.append([Step(line.pop("at"), line.pop("cpu_s"), line.pop("tokens"), line) for line in lines])
    return ranks


def measured(ranks: Sequence[Sequence[Step]], skipped: int, peak_mb: float, accuracy: float) -> Measured:
    """Returns what a run came to after its first `skipped` steps.

    Raises:
        ConfigError: no steps are left.
    """
    steps = min(map(len, ranks), default=0) - skipped
    if steps < 1 or skipped < 1:
        raise ConfigError(
            f"skip is {skipped} of {steps + skipped} steps, but the time of a step is counted from the end of the one "
            "before: skip at least one, and fewer than steps"
        )
    seconds = ranks[0][-1].at - ranks[0][skipped - 1].at
    tokens = sum(step.tokens for rank in ranks for step in rank[skipped:])
    cpu_s = sum(rank[-1].cpu_s - rank[skipped - 1].cpu_s for rank in ranks)
    return Measured(
        tokens_per_s=tokens / seconds,
        tokens_per_cpu_s=tokens / cpu_s,
        s_per_step=seconds / steps,
        tokens_per_step=tokens / steps,
        peak_mb=peak_mb,
        shares=_shares(ranks[0][skipped:], seconds),
        accuracy=accuracy,
    )


def _shares(steps: Sequence[Step], seconds: float) -> dict[str, float]:
    known = {name: sum(step.parts.get(name, 0.0) for step in steps) / seconds for name in SHARES}
    return {name.removesuffix("_s"): share for name, share in known.items()} | {"other": 1 - sum(known.values())}
