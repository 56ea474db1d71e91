"""Env steps per second of ManiSkill's own env, our env, and our rollout with the policy.

python -m experiments.bench.rollout [rounds=4] [chunks=20] [stock_steps=60] [out=docs/results/rollout.json] [overrides]

One run, alternating rounds, all on the same recorded rollout (see parts.py):

    (a) stock   ManiSkill's env: same robot, cameras and resolution, rendering every step, meshes as they are
    (b) env     our env alone: one observation per chunk, partial resets
    (c) rollout env and policy in the loop of training, in one process and one call

and with two workers: two Ray workers under the executor against two plain processes.  The policy is the
behaviour-cloned one that training starts from (made first if it is not in the cache).  Overrides are those of
train_vla.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from experiments.bench.harness import Benchmark, Goal, Run, Spread, Timing, alternate, ratios, table
from experiments.bench.harness.trainings import COLLOCATED, starting_folder
from experiments.bench.rollout.parts import FIRST_STEP, bench_config, bench_workflow, build, timed
from rlinf_embodied.algorithms.batch import RolloutReport
from rlinf_embodied.cluster.hardware import Cluster, num_cores
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.ray_session import RaySession

NUM_WORKERS = 2
LABELS = {
    "stock": "(a) stock ManiSkill, 1 core",
    "env": "(b) our env alone, 1 core",
    "rollout": "(c) our rollout, 1 worker",
    "rollout x2": "(c) our rollout, 2 plain processes",
    "ray x2": "(c) our rollout, 2 Ray workers",
}
Rounds = Mapping[str, Sequence[Timing]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    rounds: int = 4
    chunks: int = 20
    stock_steps: int = 60
    out: str = ""


class RayWorkers:
    """The same rollout under the executor on Ray."""

    def __init__(self, config: TrainConfig, folder: str) -> None:
        self._session = RaySession()
        workflow = bench_workflow(config, folder)
        plan = resolve("bench", COLLOCATED, NUM_WORKERS, workflow)
        self._executor = Executor(workflow, plan, self._session, Cluster("bench", "cpu", NUM_WORKERS, num_cores(), 0))
        self.rollout()

    def rollout(self) -> Timing:
        """Returns the rollout's timing as the driver sees it."""
        start = time.perf_counter()
        result = self._executor.run(FIRST_STEP)
        seconds = time.perf_counter() - start
        actor = [span.duration_s for span in result.spans if span.stage == "actor"]
        return Timing(seconds - max(actor), sum(report.env_steps for report in result.all_of("env", RolloutReport)))

    def close(self) -> None:
        self._session.close()


def measure(run: Run[Options]) -> None:
    own = run.options
    config = compose_train(run.overrides)
    folder = starting_folder(config)
    config = bench_config(config, own.chunks)
    on_ray = RayWorkers(config, folder)
    plain = [
        ProcessPoolExecutor(1, get_context("spawn"), build, (config, folder, worker, NUM_WORKERS, own.stock_steps))
        for worker in range(NUM_WORKERS)
    ]

    def at_once(piece: str, workers: Sequence[ProcessPoolExecutor]) -> Timing:
        done = [asked.result() for asked in [worker.submit(timed, piece) for worker in workers]]
        return done[0] if len(done) == 1 else Timing(max(t.seconds for t in done), sum(t.count for t in done))

    try:
        at_once("env", plain)  # both are built
        at_once("stock", plain[:1])
        alone = {name: partial(at_once, name, plain[:1]) for name in ("stock", "env", "rollout")}
        both = {"rollout x2": partial(at_once, "rollout", plain), "ray x2": on_ray.rollout}
        arms: dict[str, Callable[[], Timing]] = {**alone, **both}
        timings = alternate(arms, own.rounds)
    finally:
        on_ray.close()
        for worker in plain:
            worker.shutdown()
    run.write(report(timings))


def report(timings: Rounds) -> dict[str, object]:
    """Prints speeds, where the time of one worker goes, and the goals; returns them."""
    rates = {name: [timing.rate for timing in several] for name, several in timings.items()}
    speed, timed = {name: Spread.of(several) for name, several in rates.items()}, timings["rollout"]
    parts = {part: Spread.of(1e3 * t.parts[part] / t.count for t in timed) for part in timed[0].parts}
    goals = [
        Goal("(b) / (a), per core", ratios(rates["env"], rates["stock"]), 20.0),
        Goal("2 Ray workers / 2 plain processes", ratios(rates["ray x2"], rates["rollout x2"]), 0.95),
    ]
    print(table(("env steps/s", "median (min-max)"), [(LABELS[name], f"{speed[name]:.0f}") for name in LABELS]))
    header = ("ms per env step, 1 worker", "median (min-max)")
    print("", table(header, [(part, f"{spread:.3f}") for part, spread in parts.items()]), "", *goals, sep="\n")
    return {"env_steps_per_s": speed, "ms_per_env_step": parts, "goals": goals}


BENCHMARK = Benchmark("rollout", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    BENCHMARK.main()
