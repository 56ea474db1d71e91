"""Seconds per iteration of one training under several plans, and whether all of them give the same weights.

python experiments/bench_plans.py [iterations=3] [chunks=10] [cases=a,b] [out=docs/results/plans.json] [overrides]

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
from typing import TYPE_CHECKING

from bench_report import Spread, chosen, machine, split_arguments, table, use_one_thread_per_process, write_results

from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import RlinfError

if TYPE_CHECKING:
    from rlinf_embodied.telemetry.trace import Span

OWN = {"iterations": 3, "chunks": 10, "cases": "", "out": ""}


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, how many devices it has, and what runs it."""

    plan: str
    devices: int
    session: str


CASES = {
    "serial": Case("collocated", 1, "serial"),
    "collocated-1": Case("collocated", 1, "ray"),
    "collocated-2": Case("collocated", 2, "ray"),
    "disaggregated-2": Case("disaggregated", 2, "ray"),
}


@dataclass(slots=True)
class Measured:
    """What a case has shown so far."""

    iteration_s: list[float] = field(default_factory=list)
    stages_s: list[dict[str, float]] = field(default_factory=list)  # busiest worker per stage
    busiest_s: list[float] = field(default_factory=list)  # of all stages together
    rollout_env_steps: list[int] = field(default_factory=list)
    digest: str = ""

    @property
    def outside(self) -> Spread:
        """Share of the iteration that the busiest worker spent in no stage."""
        return Spread.of(1 - busy / whole for busy, whole in zip(self.busiest_s, self.iteration_s, strict=True))


def run_cases(
    config: TrainConfig, overrides: Sequence[str], cases: Mapping[str, Case], folder: str, iterations: int
) -> dict[str, Measured]:
    """Trains every case, iteration by iteration in turn."""
    from rlinf_embodied.cluster.hardware import Cluster, num_cores
    from rlinf_embodied.embodied.workflow import run_iteration, training_workflow
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.plan import resolve
    from rlinf_embodied.runtime.host import Tick
    from rlinf_embodied.runtime.sessions import make_session

    workflow = training_workflow(config, folder)
    sessions, executors = [], {}
    measured = {name: Measured() for name in cases}
    try:
        for name, case in cases.items():
            plan = compose_train([*overrides, f"plan={case.plan}"]).plan
            sessions.append(make_session(replace(config.cluster, session=case.session)))
            resolved = resolve(plan.name, plan.trees, case.devices, workflow)
            cluster = Cluster("bench", "cpu", case.devices, num_cores(), 0)
            executors[name] = Executor(workflow, resolved, sessions[-1], cluster)
        for number in range(iterations):
            for name, executor in executors.items():
                start = time.perf_counter()
                result, metrics = run_iteration(executor, number)
                account(measured[name], time.perf_counter() - start, result.spans, metrics)
            print(f"iteration {number + 1}/{iterations}", flush=True)
        for name, executor in executors.items():
            (measured[name].digest,) = {str(d) for d in executor.call("actor", "weights_digest", Tick(iterations))}
    finally:
        for session in reversed(sessions):  # the first one owns Ray
            session.close()
    return measured


def account(measured: Measured, seconds: float, spans: Sequence[Span], metrics: Mapping[str, float]) -> None:
    """Adds one iteration."""
    from rlinf_embodied.telemetry.trace import busy_seconds, stage_seconds

    by_worker: dict[int, float] = {}
    for (worker, _), busy in busy_seconds(spans).items():
        by_worker[worker] = by_worker.get(worker, 0.0) + busy
    measured.iteration_s.append(seconds)
    measured.stages_s.append(stage_seconds(spans))
    measured.busiest_s.append(max(by_worker.values()))
    measured.rollout_env_steps.append(int(metrics["rollout/env_steps"]))


def report(measured: Mapping[str, Measured]) -> dict[str, object]:
    """Prints the table and returns it as plain values."""
    rows, content = [], {}
    for name, case in measured.items():
        seconds = Spread.of(case.iteration_s)
        stages = {stage: Spread.of(s[stage] for s in case.stages_s) for stage in case.stages_s[0]}
        speed = Spread.of(n / s for n, s in zip(case.rollout_env_steps, case.iteration_s, strict=True))
        share = case.outside
        shown = ", ".join(f"{key[5:-2]} {s.median:.2f}" for key, s in stages.items())
        rows.append(
            (name, f"{seconds:.2f}", f"{speed.median:.0f}", shown, f"{100 * share.median:.1f} %", case.digest[:12])
        )
        content[name] = {
            "iteration_s": seconds,
            "env_steps_per_s": speed,
            "stages_s": stages,
            "outside_stages": share,
            "weights_sha256": case.digest,
        }
    header = ("plan", "s per iteration", "env steps/s", "s per stage", "outside", "weights")
    print(table(header, rows))
    return content


def main(arguments: Sequence[str]) -> int:
    try:
        own, overrides = split_arguments(arguments, OWN)
        cases = chosen(str(own["cases"]), CASES)
        config = compose_train([f"env.chunks_per_rollout={own['chunks']}", *overrides])
        use_one_thread_per_process()
        from bench_rollout import clone_of

        before = machine()
        measured = run_cases(config, overrides, cases, clone_of(config), int(str(own["iterations"])))
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cases_content = report(measured)
    equal = len({case.digest for case in measured.values()}) == 1
    print("weights: equal, bit for bit" if equal else "weights: DIFFERENT")
    content = {"benchmark": "plans", "arguments": list(arguments), "machine": before}
    write_results(
        str(own["out"]), content | {"weights_equal": equal, "exact": config.run.exact.holds, "plans": cases_content}
    )
    return 0 if equal or not config.run.exact.holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
