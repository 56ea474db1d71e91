"""What LIBERO costs on one core: building a task, resets, env steps, and images.

python -m experiments.bench.libero [suite=spatial] [rounds=3] [steps=20] [out=docs/results/libero.json]

One row in one process.  Seconds are the process's own CPU time, which other work on the machine does not lengthen much;
the wall time beside them is what a caller waited.  `python -m experiments.setup.foreign libero` comes first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import psutil
import torch

from envs.foreign.env import adapter_of, start_processes
from envs.foreign.simulator import ForeignSimulator
from experiments.bench.harness import Benchmark, Report, Run, Spread, Table
from rlinf_embodied.compose import compose_evaluate

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    suite: str = "spatial"
    rounds: int = 3
    steps: int = 20  # env steps of a measurement
    out: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one unit of work."""

    cpu_s: float
    wall_s: float


class Row:
    """One row of a simulator in a process of its own, and that process's CPU time."""

    def __init__(self, simulator: ForeignSimulator) -> None:
        self.simulator = simulator
        self._process = psutil.Process(simulator.pids[0])

    def cost(self, work: Callable[[], object], count: int = 1) -> Cost:
        """Returns what `count` units of work cost, each."""
        cpu, wall = self._cpu_s(), time.perf_counter()
        work()
        return Cost((self._cpu_s() - cpu) / count, (time.perf_counter() - wall) / count)

    def megabytes(self) -> float:
        """Returns the memory that the process holds, MB."""
        return self._process.memory_info().rss / MEGABYTE

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def measure(run: Run[Options]) -> Report:
    """Measures round by round."""
    own, costs = run.options, {}
    section = compose_evaluate(["env=libero", f"env.options.suite={own.suite}", "policy=random"]).env
    config = replace(section, num_envs=1, block_size=1, options={**section.options, "task": 0, "timeout_s": 3600})
    row = Row(start_processes(config, adapter_of(config), 1, "cpu"))
    generator = torch.Generator().manual_seed(0)

    def steps() -> None:
        for _ in range(own.steps):
            row.simulator.step(torch.rand(1, 7, generator=generator) * 2 - 1, [0])

    memory = {"started": row.megabytes()}
    costs["build and first reset"] = [row.cost(lambda: row.simulator.reset([0], [0]))]
    memory["one scene"] = row.megabytes()
    costs["first observation"] = [row.cost(lambda: row.simulator.images([0]))]
    memory["with its renderer"] = row.megabytes()
    for k in range(own.rounds):
        for name, work, count in (
            ("reset, 10 steps at rest", lambda k=k: row.simulator.reset([0], [k]), 1),
            ("env step", steps, own.steps),
            (f"observation, 2 x {config.obs_size} px", lambda: row.simulator.images([0]), 1),
        ):
            costs.setdefault(name, []).append(row.cost(work, count))
    row.simulator.close()
    table = Table(
        ("one row, one core", "CPU s", "wall s", "per CPU s"),
        [
            (
                name,
                f"{Spread.of(c.cpu_s for c in found):.3f}",
                f"{Spread.of(c.wall_s for c in found):.3f}",
                f"{1 / Spread.of(c.cpu_s for c in found).median:.1f}",
            )
            for name, found in costs.items()
        ],
    )
    held = ", ".join(f"{name} {size:.0f} MB" for name, size in memory.items())
    return Report(
        content={"costs": {n: [asdict(c) for c in f] for n, f in costs.items()}, "megabytes": memory},
        text=f"{table}\nmemory: {held}",
    )


BENCHMARK = Benchmark("libero", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
