"""What a staleness saves: seconds per iteration with and without overlap, on the workloads of auto_cases.py.

python -m experiments.bench.ahead [cases=robot,math_judge] [staleness=0,1] [iterations=8] [rounds=3]
                                  [out=docs/results/ahead.json] [overrides of train_vla.py or train_llm_math.py]

For each workload and staleness the stages are profiled, and the planner picks its best plan of just that staleness.
These plans train in turn, each with separate workers from the same policy; after the first iterations, in which
fronts run ahead for the first time, `iterations` of them are timed together.  Reported are seconds per iteration,
predicted and measured, and how many times faster than without staleness each is, round by round.  Rounds of one plan
end with the same weights, or the benchmark fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from experiments.bench.auto import composed, judge, profiled
from experiments.bench.auto_cases import CASES
from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate, chosen, ratios
from experiments.bench.harness.trainings import digest_of, iterations, job_of
from rlinf_embodied.cluster.hardware import cluster_at_hand
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.explain import Ranked, rank
from rlinf_embodied.runtime.session import make_session
from rlinf_embodied.training.job import Job
from rlinf_embodied.workflow.graph import Workflow

HEADER = ("workload", "staleness", "plan", "predicted, s", "measured, s", "times faster")
CORRECTED = "algorithm.tis_cap=2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = "robot,math_judge"
    staleness: str = "0,1"
    iterations: int = 8  # timed
    rounds: int = 3
    out: str = ""


@dataclass(frozen=True, slots=True)
class Arm:
    """A workload with a staleness, and its plan."""

    job: Job
    workflow: Workflow
    best: Ranked

    @staticmethod
    def of(words: Sequence[str], staleness: int) -> Arm:
        """Profiles a workload and picks its plan.

        Raises:
            ConfigError: the words are wrong.
            PlanError: no plan is possible with that staleness.
        """
        job = job_of(composed(with_staleness(words, staleness)))
        cluster, session = cluster_at_hand(job.config.cluster), make_session(job.config.cluster)
        try:
            workflow, pricer, _ = profiled(job, cluster, session)
        finally:
            session.close()
        best = rank(pricer, min_staleness=staleness, max_staleness=staleness).best
        print(f"  staleness {staleness}: {best.label}, {best.iteration_s:.3g} s predicted", flush=True)
        return Arm(job, workflow, best)

    def run(self, count: int) -> tuple[float, str]:
        """Trains; returns seconds per iteration of the last `count` ones, and the digest of the weights."""
        config, plan = self.job.config, self.best.plan
        session = make_session(config.cluster)
        try:
            executor = Executor(self.workflow, plan, session, cluster_at_hand(config.cluster))
            before = max(1, self.workflow.typical_iteration) + plan.staleness
            steps = iterations(self.job, executor, before + count)
            for _ in range(before):
                next(steps)
            start = time.perf_counter()
            for _ in steps:
                pass
            return (time.perf_counter() - start) / count, digest_of(executor)
        finally:
            session.close()


def with_staleness(words: Sequence[str], staleness: int) -> list[str]:
    """Returns the words of a workload with a staleness, and with what corrects for it where there is one."""
    return [*words, f"plan.max_staleness={staleness}", *([CORRECTED] if staleness else [])]


def measure(run: Run[Options]) -> Report:
    """Measures the chosen workloads one after the other."""
    own, cases = run.options, chosen(run.options.cases, CASES)
    try:
        behind = [int(text) for text in own.staleness.split(",")]
    except ValueError:
        raise ConfigError(f"staleness is {own.staleness!r}, but it is a list of numbers: use 0,1") from None
    if behind[0] != 0 or min(behind) < 0 or own.iterations < 1 or own.rounds < 1:
        raise ConfigError(
            f"staleness={own.staleness} iterations={own.iterations} rounds={own.rounds}: the first staleness is 0, to "
            "which others are compared, and the others are positive: use staleness=0,1"
        )
    for words in cases.values():
        composed(with_staleness([*words, *run.overrides], behind[-1]))  # typing errors cost no measurement
    found: dict[str, dict[str, object]] = {}
    rows: list[tuple[str, ...]] = []
    for case, words in cases.items():
        print(f"{case}: {' '.join(words)}", flush=True)
        with judge(words):
            arms = {str(k): Arm.of([*words, *run.overrides], k) for k in behind}
            timed = alternate({k: partial(arm.run, own.iterations) for k, arm in arms.items()}, own.rounds)
        rows += rows_of(case, {k: arm.best for k, arm in arms.items()}, timed)
        found[case] = {k: outcome(arms[k].best, timed[k], timed["0"]) for k in arms}
        run.keep({"workloads": found})
        print(Table(HEADER, rows), flush=True)
    table = Table(HEADER, rows)
    return Report(content={"workloads": found}, text=str(table), markdown=table.markdown())


Timed = Sequence[tuple[float, str]]  # what `Arm.run` gave, round by round


def outcome(best: Ranked, timed: Timed, without: Timed) -> dict[str, object]:
    """Returns what is reported of a plan; its rounds have to end with the same weights."""
    seconds = [seconds for seconds, _ in timed]
    (digest,) = {digest for _, digest in timed}
    return {
        "plan": best.label,
        "predicted_s": best.iteration_s,
        "measured_s": asdict(Spread.of(seconds)),
        "times_faster": asdict(ratios([seconds for seconds, _ in without], seconds)),
        "weights_sha256": digest,
    }


def rows_of(case: str, best: Mapping[str, Ranked], timed: Mapping[str, Timed]) -> list[tuple[str, ...]]:
    """Returns a row per staleness."""
    without = [seconds for seconds, _ in timed["0"]]
    rows = []
    for k, entry in best.items():
        seconds = [seconds for seconds, _ in timed[k]]
        measured, faster = Spread.of(seconds), ratios(without, seconds)
        rows.append((case, k, entry.label, f"{entry.iteration_s:.2f}", f"{measured:.2f}", f"{faster:.2f}"))
    return rows


BENCHMARK = Benchmark("ahead", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
