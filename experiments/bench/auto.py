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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.bench.auto_cases import CASES, FEW
from experiments.bench.harness import Benchmark, Run, Spread, alternate, chosen, table
from experiments.bench.harness.trainings import digest_of, iterations, job_of, timed_iteration
from experiments.examples.http_judge import URL
from experiments.profile_stages import compose_job
from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.compose import choices
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.explain import rank, rows
from rlinf_embodied.planning.notation import resolve, to_text
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import as_measured
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.session import make_session
from rlinf_embodied.telemetry.live import LiveView
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan of a workload: seconds per iteration, predicted and measured."""

    plan: str  # as text
    predicted_s: float
    stages_s: Mapping[str, float]  # predicted
    measured_s: Spread
    outside_stages: Spread  # the share of an iteration that the busiest worker spent in no stage
    weights_sha256: str

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_s / self.measured_s.median - 1


Outcomes = Mapping[str, Outcome]  # of a workload's plans by name; the picked one is called auto


# -------------------------------------------------------------------------------------------------------------- trained
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
    config = compose_job(overrides)
    job, cluster = job_of(config), cluster_at_hand(config.cluster)
    if cluster.num_devices < 2:
        raise ConfigError("cluster.num_devices is 1, but one device has one plan: use a machine with two")
    workflow, pricer, profile_s = profiled(job, cluster)
    ranked = rank(pricer, max_staleness=config.plan.max_staleness).plans
    print(text_table(rows(ranked)), flush=True)
    picked = {f"next {k}" if k else "auto": entry.plan for k, entry in enumerate(ranked[: 1 + next_best])}
    plans = presets(overrides, pricer, names) | {name: replace(plan, name=name) for name, plan in picked.items()}
    return trained(job, workflow, plans, pricer, count), profile_s


def profiled(job: Job, cluster: Cluster) -> tuple[Workflow, Pricer, float]:
    """Makes the policy that training starts from and profiles the stages.

    Returns the graph, its prices, and the seconds that measuring took.
    """
    view = LiveView(1)
    with closing(make_session(job.config.cluster)) as session:
        folder = str(job.starting_policy(session, cluster, view.progress))
        session.clear()
        start, workflow = time.perf_counter(), job.workflow(folder)
        profile, _ = measured_profile(job, cluster, folder, session, view.progress)
        seconds = time.perf_counter() - start
    return workflow, Pricer(as_measured(workflow, profile), profile, cluster), seconds


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
    for name in [*choices("plan", type(compose_job(overrides))), *(name for name in names if name.endswith(".yaml"))]:
        preset = compose_job([*overrides, f"plan={name}"]).plan
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


def trained(job: Job, workflow: Workflow, plans: Mapping[str, Plan], pricer: Pricer, count: int) -> dict[str, Outcome]:
    """Alternates the plans' iterations; each plan has separate workers, which are stopped while another runs."""
    ahead = max(plan.staleness for plan in plans.values())
    before = max(1, workflow.typical_iteration) + ahead  # these do not count: what is done once is done then
    with ExitStack() as opened:
        sessions = {name: opened.enter_context(closing(make_session(job.config.cluster))) for name in plans}
        executors = {name: Executor(workflow, plan, sessions[name], pricer.cluster) for name, plan in plans.items()}
        arms = {}
        for name, executor in executors.items():
            others = [session for other, session in sessions.items() if other != name]
            arms[name] = partial(timed_iteration, iterations(job, executor, before + count), others)
        timed = alternate(arms, count, warm_up=before, quiet=True)
        digests = {name: digest_of(executor) for name, executor in executors.items()}
    return {name: outcome(plan, pricer, timed[name], digests[name]) for name, plan in plans.items()}


def outcome(plan: Plan, pricer: Pricer, timed: Sequence[tuple[float, float]], digest: str) -> Outcome:
    """Returns what is reported of a plan; `timed` is what `timed_iteration` gave, iteration by iteration."""
    predicted, (measured, outside) = simulate(plan, pricer), (Spread.of(values) for values in zip(*timed, strict=True))
    return Outcome(to_text(plan), predicted.iteration_s, dict(predicted.stages_s), measured, outside, digest)


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


def table_of(case: str, plans: Outcomes) -> str:
    rows = []
    for name, found in plans.items():
        verdict_of_picked = verdict(plans)[1] if name == "auto" else ""
        seconds = (f"{found.predicted_s:.2f}", f"{found.measured_s:.2f}", f"{found.error:+.1%}")
        rows.append((case, name, *seconds, verdict_of_picked))
    return table(HEADER, rows)


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


def measure(run: Run[Options]) -> int:
    """Runs workload by workload; returns 1 where a picked plan is not among the fastest."""
    own, cases = run.options, chosen(run.options.cases, CASES)
    for case in cases.values():
        compose_job([*case, *run.overrides])  # typing errors cost no measurement
    measured: dict[str, Outcomes] = {}
    for case, words in cases.items():
        print(f"{case}: {' '.join(words)}", flush=True)
        with judge(words):
            asked = [*words, *run.overrides]
            measured[case], profile_s = run_case(asked, own.iterations, FEW.get(case, ()), own.next_best)
        print(table_of(case, measured[case]), f"the profile took {profile_s:.0f} s", sep="\n", flush=True)
        outside = (f"{name} {found.outside_stages.median:.1%}" for name, found in measured[case].items())
        print("in no stage: " + ", ".join(outside), flush=True)
        run.write(summary(measured))
    found = summary(measured)
    print(f"errors of the predictions: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
    return 0 if all(verdict(plans)[0] for plans in measured.values()) else 1


BENCHMARK = Benchmark("auto", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    BENCHMARK.main()
