"""Is the plan that plan=auto picks the fastest one, and how good are the predictions?  Real workloads (auto_cases.py).

python -m experiments.bench.auto [cases=pick,point_reach] [iterations=3] [next_best=0]
                                 [out=docs/results/auto.json] [overrides of train_vla.py or train_llm_math.py]

For each workload the stages are profiled.  Then every preset plan and the picked plan train the same config from the
same policy, iteration by iteration in alternation; with next_best=2 also the two best plans of other shapes.  Printed,
and written to `out`: predicted against measured seconds per iteration of each plan; whether the
picked one is the fastest, or within 3 % of it, or within the spread of the measurement (otherwise the exit code is 1);
and the share of an iteration that the busiest worker spent in no stage.  With plan.max_staleness=1
algorithm.tis_cap=2.0 the picked plan may run ahead.

The first six take about 17 minutes on two cores.  Overrides apply to every workload of a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.bench.auto_cases import CASES, FEW, REASONING
from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate, chosen
from experiments.bench.harness.trainings import digest_of, iterations, job_of, timed_iteration
from experiments.examples.http_judge import URL
from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.compose import choices, compose_math, compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.calls import Simulation
from rlinf_embodied.planning.explain import rank, rows
from rlinf_embodied.planning.notation import resolve, to_text
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import as_measured
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.session import Session, make_session
from rlinf_embodied.telemetry.tables import text_table
from rlinf_embodied.training.job import Job
from rlinf_embodied.training.planning import measured_profile
from rlinf_embodied.workflow.graph import Workflow

WITHIN = 0.03  # of the fastest
HEADER = ("workload", "plan", "predicted, s", "measured, s", "error", "the picked plan is")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""
    iterations: int = 3
    next_best: int = 0
    out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan of a workload: seconds per iteration, predicted and measured."""

    predicted_s: float
    stages_s: dict[str, float]  # predicted
    measured_s: Spread
    plan: str  # as text
    weights_sha256: str
    outside_stages: Spread
    error: float  # of the prediction, relative


Outcomes = Mapping[str, Outcome]  # of a workload's plans by name; the picked one is called auto


# -------------------------------------------------------------------------------------------------------------- trained
def composed(words: Sequence[str]) -> TrainConfig | MathConfig:
    return compose_math([word for word in words if word != REASONING]) if REASONING in words else compose_train(words)


def run_case(
    overrides: Sequence[str], count: int, names: Sequence[str] = (), next_best: int = 0
) -> tuple[dict[str, Outcome], float]:
    """Profiles a workload and trains it under every plan in alternation; the picked one is called auto.

    Returns what came of each plan, and the seconds that the profile took.

    Args:
        overrides: of the workload.
        count: iterations of each plan.
        names: of the presets, all if there are none.
        next_best: how many plans are added that the planner ranks behind the picked one (next 1, ...).

    Raises:
        ConfigError: the overrides are wrong, or there is one device.
    """
    config = composed(overrides)
    job, cluster = job_of(config), cluster_at_hand(config.cluster)
    if cluster.num_devices < 2:
        raise ConfigError("cluster.num_devices is 1, but one device has one plan: use a machine with two")
    begin = partial(make_session, config.cluster)
    session = begin()
    try:
        workflow, pricer, profile_s = profiled(job, cluster, session)
        ranked = rank(pricer, max_staleness=config.plan.max_staleness).plans
        print(text_table(rows(ranked)), flush=True)
        plans = presets(overrides, pricer, names) | {"auto": replace(ranked[0].plan, name="auto")}
        behind = enumerate(ranked[1 : 1 + next_best], start=1)
        plans |= {f"next {k}": replace(entry.plan, name=f"next {k}") for k, entry in behind}
        return _trained(job, workflow, plans, pricer, session, begin, count), profile_s
    finally:
        session.close()


def profiled(job: Job, cluster: Cluster, session: Session) -> tuple[Workflow, Pricer, float]:
    """Makes the policy that training starts from and profiles the stages; the session is left without stages.

    Returns the graph, its prices, and the seconds that measuring took.
    """
    folder = str(job.starting_policy(session, cluster, shown))
    session.clear()
    start, workflow = time.perf_counter(), job.workflow(folder)
    profile, _ = measured_profile(job, cluster, folder, session, shown)
    seconds = time.perf_counter() - start
    return workflow, Pricer(as_measured(workflow, profile), profile, cluster), seconds


def shown(what: str, done: int, total: int, remark: str) -> None:
    if done == total:
        print(f"  {what} {remark}".rstrip(), flush=True)


@contextmanager
def judge(overrides: Sequence[str]) -> Iterator[None]:
    """Runs the judge in a separate process for a workload that asks one."""
    if not any("http_judge" in text for text in overrides):
        yield
        return
    command = [sys.executable, "-m", "experiments.examples.http_judge", "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.environ[URL] = process.stdout.readline().strip().partition("=")[2]
        try:
            yield
        finally:
            process.terminate()


def presets(overrides: Sequence[str], pricer: Pricer, names: Sequence[str] = ()) -> dict[str, Plan]:
    """Returns every preset that fits, by name; those of these names, if there are any; names may be plan files, too."""
    found = {}
    for name in [*choices("plan", type(composed(overrides))), *(name for name in names if name.endswith(".yaml"))]:
        preset = composed([*overrides, f"plan={name}"]).plan
        if preset.is_auto or (names and name not in names):
            continue
        try:
            plan = resolve(preset.name, preset.variants, pricer.cluster, pricer.workflow)
        except PlanError as error:
            print(f"  {name}: {error}")
            continue
        if pricer.fits(plan):
            found[preset.name] = plan
        else:
            print(f"  {name}: devices do not hold what the plan needs")
    return found


def _trained(
    job: Job,
    workflow: Workflow,
    plans: Mapping[str, Plan],
    pricer: Pricer,
    first: Session,
    begin: Callable[[], Session],
    count: int,
) -> dict[str, Outcome]:
    """Alternates the plans' iterations; each plan has separate workers, which are stopped while another runs.

    `first` lends its workers to one plan: idle ones would only take memory.
    """
    cluster = cluster_at_hand(job.config.cluster)
    ahead = max(plan.staleness for plan in plans.values())
    before = max(1, workflow.typical_iteration) + ahead  # these do not count: what is done once is done then
    sessions: dict[str, Session] = {}  # the first one's owner closes it
    executors: dict[str, Executor] = {}
    try:
        for name, plan in plans.items():
            sessions[name] = begin() if sessions else first
            executors[name] = Executor(workflow, plan, sessions[name], cluster)
        arms = {}
        for name, executor in executors.items():
            others = [session for other, session in sessions.items() if other != name]
            steps = iterations(job, executor, before + count)
            arms[name] = partial(timed_iteration, steps, others)
        found = alternate(arms, count, warm_up=before, quiet=True)
        return {
            name: outcome(simulate(plan, pricer), plan, found[name], digest_of(executors[name]))
            for name, plan in plans.items()
        }
    finally:
        for session in sessions.values():
            if session is not first:
                session.close()


def outcome(predicted: Simulation, plan: Plan, found: Sequence[tuple[float, float]], digest: str) -> Outcome:
    """Returns what is reported of a plan; `found` is what `timed_iteration` gave, iteration by iteration."""
    measured, outside = (Spread.of(values) for values in zip(*found, strict=True))
    return Outcome(
        predicted_s=predicted.iteration_s,
        stages_s=dict(predicted.stages_s),
        measured_s=measured,
        plan=to_text(plan),
        weights_sha256=digest,
        outside_stages=outside,
        error=predicted.iteration_s / measured.median - 1,
    )


# ------------------------------------------------------------------------------------------------------------ concluded
def verdict(found: Outcomes) -> tuple[bool, str]:
    """Returns whether the picked plan is the fastest (or as good as it), and how that is meant."""
    measured = {name: outcome.measured_s for name, outcome in found.items()}
    best = min(measured, key=lambda name: measured[name].median)
    auto = measured["auto"]
    if auto.median <= measured[best].median:
        return True, "the fastest"
    behind = auto.median / measured[best].median - 1
    if behind <= WITHIN:
        return True, f"{behind:.1%} behind {best}, within {WITHIN:.0%}"
    if auto.low <= measured[best].high:
        return True, f"{behind:.1%} behind {best}, within the spread"
    return False, f"{behind:.1%} behind {best}"


def table_of(results: Mapping[str, Outcomes]) -> Table:
    rows = []
    for case, plans in results.items():
        for name, found in plans.items():
            said = verdict(plans)[1] if name == "auto" else ""
            rows.append(
                (case, name, f"{found.predicted_s:.2f}", f"{found.measured_s:.2f}", f"{found.error:+.1%}", said)
            )
    return Table(HEADER, rows)


def summary(results: Mapping[str, Outcomes]) -> dict[str, Any]:
    """Returns the errors over all plans and the verdicts by workload."""
    errors = [abs(outcome.error) for found in results.values() for outcome in found.values()]
    return {
        "median_error": Spread.of(errors).median,
        "worst_error": max(errors),
        "verdicts": {case: verdict(found)[1] for case, found in results.items()},
        "weights_equal": all(len({o.weights_sha256 for o in found.values()}) == 1 for found in results.values()),
        "workloads": results,
    }


def measure(run: Run[Options]) -> Report:
    own, cases = run.options, chosen(run.options.cases, CASES)
    for case in cases.values():
        composed([*case, *run.overrides])  # typing errors cost no measurement
    measured: dict[str, dict[str, Outcome]] = {}
    for case, words in cases.items():
        print(f"{case}: {' '.join(words)}", flush=True)
        with judge(words):
            asked = [*words, *run.overrides]
            measured[case], profile_s = run_case(asked, own.iterations, FEW.get(case, ()), own.next_best)
        print(table_of({case: measured[case]}), flush=True)
        print(f"the profile took {profile_s:.0f} s", flush=True)
        outside = (f"{name} {found.outside_stages.median:.1%}" for name, found in measured[case].items())
        print("in no stage: " + ", ".join(outside), flush=True)
        run.keep(summary(measured))
    return report(measured)


def report(results: Mapping[str, Outcomes]) -> Report:
    """Returns errors and verdicts; the exit code is 1 where a picked plan is not among the fastest."""
    found = summary(results)
    errors = f"errors of the predictions: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}"
    good = all(verdict(plans)[0] for plans in results.values())
    return Report(content=found, text=f"{table_of(results)}\n{errors}", exit_code=0 if good else 1)


BENCHMARK = Benchmark("auto", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    BENCHMARK.main()
