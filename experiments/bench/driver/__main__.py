"""The driver's cost per iteration, per call and per health check, by the number of workers.

python -m experiments.bench.driver [workers=8,32,64,128,256] [iterations=3] [chunk_steps=25] [relays=true]
                                  [out=driver.json]

Workers are real Ray processes on emulated devices whose stages do nothing, so that only the system's cost remains.
Half of the workers are simulators, the other half policies; chunk-steps alternate in two shards, and all of them
train.  With relays=false the driver makes every call of a chunk-step itself, as it does if several workers serve a
simulator: the most calls that a plan makes.  Seconds are CPU seconds of the driver's process, Ray's threads in
it included.  Wall seconds are this machine's, which runs all the workers on its few cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from experiments.bench.harness import Benchmark, Run, Spread, table
from rlinf_embodied.cluster.hardware import EMULATED, Cluster
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.workflow.graph import Edge, Loop, StageSpec, Workflow

ITERATION_S = 60.0  # of a large run; what the share is of
LOOKS = 10
START_S = 7200.0  # for processes of hundreds of workers on few cores
# simulators and policies on halves of the workers, in two shards; training on all
HALVES = [{"items": ["env on 0:1/2 | policy on 1/2:1 in 2 shards", "actor on all"]}]
HEADER = ("workers", "calls", "driver s per iteration", "of 60 s", "us per call", "a look, ms", "wall s", "start s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    workers: str = "8,32,64,128,256"
    iterations: int = 3
    chunk_steps: int = 25
    relays: bool = True
    out: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What so many workers cost the driver."""

    workers: int
    calls: int  # per iteration
    driver_s: Spread  # CPU seconds per iteration
    wall_s: Spread
    look_s: Spread  # CPU seconds of asking all workers what they do, once a second while the driver waits
    start_s: float  # wall, until all workers and stages are up

    def row(self) -> tuple[str, ...]:
        seconds = self.driver_s
        share, per_call = 100 * seconds.median / ITERATION_S, 1e6 * seconds.median / self.calls
        return (
            *(str(self.workers), f"{self.calls:,}", f"{seconds:.2f}", f"{share:.1f} %", f"{per_call:.0f}"),
            *(f"{1e3 * self.look_s.median:.1f}", f"{self.wall_s.median:.1f}", f"{self.start_s:.0f}"),
        )


def workflow_of(workers: int, chunk_steps: int) -> Workflow:
    """Returns an embodied graph of stages that do nothing: two blocks for each simulator."""
    stages = {
        name: StageSpec(name, "experiments.bench.driver.stage.Nothing", None) for name in ("env", "policy", "actor")
    }
    edges = (Edge("env", "actor"), Edge("policy", "actor"))
    return Workflow("nothing", workers, stages, edges, loops={"rollout": Loop("rollout", "env", "policy", chunk_steps)})


class CountingSession(RaySession):
    """Counts calls."""

    calls = 0

    def submit(self, calls, collective=False):
        self.calls += len(calls)
        return super().submit(calls, collective)

    def look(self) -> None:
        self._health.check()


def measure_one(workers: int, own: Options) -> Measured:
    session, start = CountingSession(first_progress_s=START_S), time.perf_counter()
    session.relays = own.relays
    try:
        cluster = Cluster("bench", EMULATED, workers, workers, 1 << 30, emulated=True)
        workflow = workflow_of(workers, own.chunk_steps)
        executor = Executor(workflow, resolve("halves", HALVES, workers, workflow), session, cluster)
        executor.run(StepContext(0))
        start_s, driver_s, wall_s, look_s = time.perf_counter() - start, [], [], []
        session.calls = 0
        for k in range(1, own.iterations + 1):
            before, begin = time.process_time(), time.perf_counter()
            executor.run(StepContext(k))
            driver_s.append(time.process_time() - before)
            wall_s.append(time.perf_counter() - begin)
        for _ in range(LOOKS):
            before = time.process_time()
            session.look()
            look_s.append(time.process_time() - before)
        calls = session.calls // own.iterations
        return Measured(workers, calls, Spread.of(driver_s), Spread.of(wall_s), Spread.of(look_s), start_s)
    finally:
        session.close()


def measure(run: Run[Options]) -> None:
    try:
        numbers = [int(text) for text in run.options.workers.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(number < 2 or number % 2 for number in numbers):
        raise ConfigError(f"workers is {run.options.workers!r}, but it is a list of even numbers: use workers=8,32")
    found = []
    for number in numbers:
        found.append(measure_one(number, run.options))
        print("  ".join(found[-1].row()), flush=True)
    print(table(HEADER, [one.row() for one in found]))
    run.write({"driver": found})


BENCHMARK = Benchmark("driver", Options, measure)

if __name__ == "__main__":
    BENCHMARK.main()
