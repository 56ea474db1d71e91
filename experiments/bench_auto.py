"""Is the plan that plan=auto picks the fastest one, and how good are the predictions?  Eight workloads, for real.

python experiments/bench_auto.py [cases=pick,point_reach] [iterations=3] [out=docs/results/auto.json]
                                 [join=earlier.json] [overrides of train_vla.py or train_llm_math.py]

For each workload: the stages are profiled anew, then every preset plan and the one that is picked train the same config
from the same policy, iteration by iteration in alternation.  Printed, and written as JSON, Markdown and a scatter plot
beside `out`: predicted against measured seconds per iteration of each plan, and whether the picked one is the fastest,
or within 3 % of it, or within the spread of the measurement.  The exit code is 1 where it is neither.

The first six took 16.6 minutes on two cores.  They may be measured in several runs: the report of a run with
`join=<JSON of an earlier one>` has that one's workloads too, but for those that were measured now.  Overrides apply to
every workload of a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from auto_report import HEADER, Outcome, lines_of, read, summary, verdict, write_report
from bench_report import (
    Spread,
    chosen,
    earlier_results,
    joined,
    machine,
    split_arguments,
    table,
    use_one_thread_per_process,
)

from rlinf_embodied.compose import choices, compose_math, compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.errors import ConfigError, PlanError, RlinfError

if TYPE_CHECKING:
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.drift import Prediction
    from rlinf_embodied.flow.plan import Plan
    from rlinf_embodied.runtime.session import Session
    from rlinf_embodied.training.job import Job

REASONING = "workflow=reasoning"
OWN = {"cases": "", "iterations": 3, "join": "", "out": ""}

_SHORT = ("env.chunks_per_rollout=10", "warm_start.num_demos=24", "warm_start.epochs=2", "warm_start.head_epochs=4")
_LARGE = ("policy.hidden_size=256", "policy.num_layers=4", "policy.stem_width=96")
CASES: dict[str, tuple[str, ...]] = {
    "pick": ("env=maniskill_pick", *_SHORT),
    "pick_large": ("env=maniskill_pick", *_SHORT, *_LARGE),
    # as near to state alone as a policy that sees can be: small pictures cost next to nothing
    "pick_state": ("env=maniskill_pick", *_SHORT, "env.obs_size=16", "policy.stem_width=16", "policy.keypoints=4"),
    # chunks of ten actions: twice the physics for each picture and each answer
    "cpu_heavy": ("env=maniskill_pick", *_SHORT, "env.chunk=10", "env.chunks_per_rollout=5", "env.obs_size=32"),
    "policy_heavy": ("env=point_reach", "warm_start.num_demos=24", "warm_start.epochs=1", *_LARGE, "env.obs_size=64"),
    "point_reach": ("env=point_reach", "warm_start.num_demos=48", "warm_start.epochs=4", "env.chunks_per_rollout=20"),
    "math_grpo": (REASONING, "warm_start.steps=400"),
    "math_ppo": (REASONING, "algorithm=ppo", "warm_start.steps=400", "algorithm.critic_warmup_iterations=1"),
}


@dataclass(slots=True)
class Candidate:
    """A plan of a workload: what was predicted, and what iterations took."""

    plan: Plan
    predicted: Prediction
    seconds: list[float] = field(default_factory=list)
    digest: str = ""


def composed(words: Sequence[str]) -> TrainConfig | MathConfig:
    """Returns the config of a workload."""
    return compose_math([word for word in words if word != REASONING]) if REASONING in words else compose_train(words)


def job_of(config: TrainConfig | MathConfig) -> Job:
    """Returns the workload as what the trainer runs."""
    from rlinf_embodied.embodied.job import EmbodiedJob
    from rlinf_embodied.reasoning.job import ReasoningJob

    return ReasoningJob(config) if isinstance(config, MathConfig) else EmbodiedJob(config)


def run_case(overrides: Sequence[str], iterations: int) -> dict[str, Candidate]:
    """Profiles a workload and trains it under every plan in alternation; the picked one is called auto."""
    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.flow.catalogue import as_measured, linked
    from rlinf_embodied.flow.explain import rank, rows
    from rlinf_embodied.flow.pricing import Pricer
    from rlinf_embodied.runtime.sessions import make_session
    from rlinf_embodied.telemetry.tables import text_table
    from rlinf_embodied.training.planning import measured_profile

    config = composed(overrides)
    job = job_of(config)
    cluster = cluster_at_hand(config.cluster)
    if cluster.num_devices < 2:
        raise ConfigError("cluster.num_devices is 1, but one device has one plan: use a machine with two")
    shown = lambda what, done, total, remark: None if done < total else print(f"  {what} {remark}".rstrip())  # noqa: E731
    session = make_session(config.cluster)
    try:
        folder = job.starting_policy(session, cluster, shown)
        session.clear()
        workflow = job.workflow(str(folder))
        profile, _ = measured_profile(job, cluster, workflow, session, shown)
        pricer = Pricer(as_measured(workflow, profile), profile, linked(cluster, profile))
        ranked, _ = rank(pricer)
        print(text_table(rows(ranked)), flush=True)
        found = candidates(overrides, pricer, replace(ranked[0].plan, name="auto"))
        _alternate(job, str(folder), found, session, iterations)
    finally:
        session.close()
    return found


def candidates(overrides: Sequence[str], pricer, auto: Plan) -> dict[str, Candidate]:
    """Returns every preset that fits, by name, and the plan that was picked."""
    from rlinf_embodied.flow.drift import predict
    from rlinf_embodied.flow.plan import resolve

    found = {}
    for name in choices("plan", type(composed(overrides))):
        preset = composed([*overrides, f"plan={name}"]).plan
        if preset.is_auto:
            continue
        try:
            plan = resolve(name, preset.trees, pricer.cluster.num_devices, pricer.workflow)
        except PlanError as error:
            print(f"  {name}: {error}")
            continue
        found[name] = Candidate(plan, predict(pricer, plan))
    return found | {"auto": Candidate(auto, predict(pricer, auto))}


def _alternate(job: Job, folder: str, found: Mapping[str, Candidate], first: Session, iterations: int) -> None:
    """Runs the candidates' iterations in turn, each with workers of its own; `first` lends its workers to one.

    Every worker takes a book-keeping CPU of Ray, and there are eight at least: enough for four candidates on two
    devices, but not for idle workers beside them.
    """
    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.runtime.host import Tick
    from rlinf_embodied.runtime.sessions import make_session
    from rlinf_embodied.training.job import Progress

    config = job.config
    workflow, cluster = job.workflow(folder), cluster_at_hand(config.cluster)
    sessions: list[Session] = []  # beside the first one, whose owner closes it
    executors: dict[str, Executor] = {}
    progress = {name: Progress() for name in found}
    try:
        for name, candidate in found.items():
            if executors:
                sessions.append(make_session(config.cluster))
            executors[name] = Executor(workflow, candidate.plan, sessions[-1] if sessions else first, cluster)
        # the iterations before do not count: what is done once is done then
        for number in range(max(1, workflow.typical_iteration) + iterations):
            for name in sorted(executors, reverse=bool(number % 2)):
                start = time.perf_counter()
                job.run_iteration(executors[name], progress[name])
                progress[name].iteration += 1
                if number >= max(1, workflow.typical_iteration):
                    found[name].seconds.append(time.perf_counter() - start)
        for name, executor in executors.items():
            found[name].digest = str(executor.call("actor", "weights_digest", Tick(0))[0])
    finally:
        for session in sessions:
            session.close()


def main(arguments: Sequence[str]) -> int:
    try:
        own, overrides = split_arguments(arguments, OWN)
        cases = chosen(str(own["cases"]), CASES)
        for case in cases.values():
            composed([*case, *overrides])  # typing errors cost no measurement
        earlier = earlier_results(str(own["join"]), "auto")
        kept = {case: read(plans) for case, plans in earlier.get("workloads", {}).items() if case not in cases}
        use_one_thread_per_process()
        run, measured = {"arguments": list(arguments), "machine": machine()}, {}
        for case, words in cases.items():
            print(f"{case}: {' '.join(words)}", flush=True)
            measured[case] = outcomes(run_case([*words, *overrides], int(str(own["iterations"]))))
            print(table(HEADER, lines_of(case, measured[case])), flush=True)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = kept | measured
    found = summary(results)
    print(table(HEADER, [row for case, plans in results.items() for row in lines_of(case, plans)]))
    print(f"errors of the predictions: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
    write_report(str(own["out"]), results, {"benchmark": "auto"} | joined(run, earlier, list(kept)) | found)
    return 0 if all(verdict(plans)[0] for plans in measured.values()) else 1


def outcomes(found: Mapping[str, Candidate]) -> dict[str, Outcome]:
    """Returns what is reported of each plan of a workload."""
    return {
        name: Outcome(
            predicted_s=candidate.predicted.iteration_s,
            stages_s=dict(candidate.predicted.stages_s),
            measured_s=Spread.of(candidate.seconds),
            tree=candidate.plan.to_dict()["tree"],
            weights_sha256=candidate.digest,
        )
        for name, candidate in found.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
