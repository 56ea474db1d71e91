"""Seconds per iteration of one training under several plans, and whether all of them give the same weights.

python -m experiments.bench.plans [iterations=3] [chunks=10] [cases=a,b] [out=docs/results/plans.json] [overrides]

Every case trains the same config from the same policy folder; iterations alternate between the cases.  Printed for
each: seconds per iteration, the busiest worker's seconds per stage, the share of the iteration that the busiest worker
spent in no stage (the executor's own time, waits and wires), and the digest of the weights after the last iteration.
The exit code is 1 if run.exact holds and the digests differ.  Overrides are those of train_vla.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate, chosen
from experiments.bench.harness.trainings import digest_of, iterations, job_of, outside_stages, starting_folder
from rlinf_embodied.cluster.hardware import Cluster, num_cores
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.runtime.sessions import make_session
from rlinf_embodied.telemetry.trace import Span, stage_seconds

CASES = {  # plan, devices, what runs it
    "serial": ("collocated", 1, "serial"),
    "collocated-1": ("collocated", 1, "ray"),
    "collocated-2": ("collocated", 2, "ray"),
    "disaggregated-2": ("disaggregated", 2, "ray"),
}
HEADER = ("plan", "s per iteration", "env steps/s", "s per stage", "outside", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    iterations: int = 3
    chunks: int = 10
    cases: str = ""
    out: str = ""


@dataclass(slots=True)
class Measured:
    """What a case has shown so far."""

    iteration_s: list[float] = field(default_factory=list)
    stages_s: list[dict[str, float]] = field(default_factory=list)  # busiest worker per stage
    outside_stages: list[float] = field(default_factory=list)  # shares
    rollout_env_steps: list[int] = field(default_factory=list)
    digest: str = ""

    def add(self, seconds: float, spans: Sequence[Span], metrics: Mapping[str, float]) -> None:
        """Adds one iteration."""
        self.iteration_s.append(seconds)
        self.stages_s.append(stage_seconds(spans))
        self.outside_stages.append(outside_stages(spans, seconds))
        self.rollout_env_steps.append(int(metrics["rollout/env_steps"]))

    def to_json(self) -> dict[str, Any]:
        """Returns spreads; "outside_stages" is the share of the iteration that the busiest worker spent in no stage."""
        steps = zip(self.rollout_env_steps, self.iteration_s, strict=True)
        return {
            "iteration_s": Spread.of(self.iteration_s),
            "env_steps_per_s": Spread.of(number / seconds for number, seconds in steps),
            "stages_s": {stage: Spread.of(s[stage] for s in self.stages_s) for stage in self.stages_s[0]},
            "outside_stages": Spread.of(self.outside_stages),
            "weights_sha256": self.digest,
        }

    def row(self) -> tuple[str, ...]:
        """Returns its cells of the table."""
        found = self.to_json()
        stages = ", ".join(f"{key[5:-2]} {s.median:.2f}" for key, s in found["stages_s"].items())
        seconds, speed, outside = (found[key] for key in ("iteration_s", "env_steps_per_s", "outside_stages"))
        medians = f"{speed.median:.0f}", stages, f"{100 * outside.median:.1f} %"
        return f"{seconds:.2f}", *medians, self.digest[:12]


def train(config: TrainConfig, run: Run[Options]) -> dict[str, Measured]:
    """Trains every case, iteration by iteration in turn."""
    cases, count = chosen(run.options.cases, CASES), run.options.iterations
    workflow = training_workflow(config, starting_folder(config))
    measured, executors = {name: Measured() for name in cases}, {}
    sessions: list[Session] = []
    try:
        for name, (preset, devices, session) in cases.items():
            plan = compose_train([*run.overrides, f"plan={preset}"]).plan
            sessions.append(make_session(replace(config.cluster, session=session)))
            cluster = Cluster("bench", "cpu", devices, num_cores(), 0)
            resolved = resolve(plan.name, plan.trees, devices, workflow)
            executors[name] = Executor(workflow, resolved, sessions[-1], cluster)
        steps = {name: iterations(job_of(config), executor, count) for name, executor in executors.items()}

        def advance(name: str) -> None:
            start = time.perf_counter()
            result, metrics = next(steps[name])
            measured[name].add(time.perf_counter() - start, result.spans, metrics)

        alternate({name: partial(advance, name) for name in cases}, count)
        for name, executor in executors.items():
            measured[name].digest = digest_of(executor)
    finally:
        for session in reversed(sessions):  # the first one owns Ray
            session.close()
    return measured


def measure(run: Run[Options]) -> Report:
    """Trains all cases and compares their weights."""
    chosen(run.options.cases, CASES)
    config = compose_train([f"env.chunks_per_rollout={run.options.chunks}", *run.overrides])
    measured = train(config, run)
    equal = len({case.digest for case in measured.values()}) == 1
    table = Table(HEADER, [(name, *case.row()) for name, case in measured.items()])
    plans = {name: case.to_json() for name, case in measured.items()}
    return Report(
        content={"weights_equal": equal, "exact": config.run.exact.holds, "plans": plans},
        text=f"{table}\n" + ("weights: equal, bit for bit" if equal else "weights: DIFFERENT"),
        exit_code=0 if equal or not config.run.exact.holds else 1,
    )


BENCHMARK = Benchmark("plans", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
