"""Is the plan that plan=auto picks the fastest one, and how good are the predictions?  Six workloads, for real.

python experiments/bench_auto.py [cases=pick,point_reach] [iterations=3] [out=docs/results/auto.json] [overrides]

For each workload: the stages are profiled anew, then every preset plan and the one that is picked train the same config
from the same policy, iteration by iteration in alternation.  Printed, and written as JSON, Markdown and a scatter plot
beside `out`: predicted against measured seconds per iteration of each plan, and whether the picked one is the fastest,
or within 3 % of it, or within the spread of the measurement.  The exit code is 1 where it is neither.

With the defaults it takes about 15 minutes on two quiet cores (pick 2.5, pick_large 3.5, pick_state 2, cpu_heavy 2.5,
policy_heavy 3, point_reach 1).  Overrides of train_vla.py apply to every workload.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench_report import Spread, chosen, machine, split_arguments, table, use_one_thread_per_process, write_results

from rlinf_embodied.compose import choices, compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import ConfigError, PlanError, RlinfError

if TYPE_CHECKING:
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.drift import Prediction
    from rlinf_embodied.flow.plan import Plan
    from rlinf_embodied.runtime.session import Session

OWN = {"cases": "", "iterations": 3, "out": ""}
WITHIN = 0.03  # of the fastest

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
}


@dataclass(slots=True)
class Candidate:
    """A plan of a workload: what was predicted, and what iterations took."""

    plan: Plan
    predicted: Prediction
    seconds: list[float] = field(default_factory=list)
    digest: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted.iteration_s / Spread.of(self.seconds).median - 1


def run_case(overrides: Sequence[str], iterations: int) -> dict[str, Candidate]:
    """Profiles a workload and trains it under every plan in alternation; the picked one is called auto."""
    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.embodied.planning import measured_profile
    from rlinf_embodied.embodied.trainer import make_session
    from rlinf_embodied.embodied.warm_start import starting_policy
    from rlinf_embodied.embodied.workflow import training_workflow
    from rlinf_embodied.flow.catalogue import as_measured, linked
    from rlinf_embodied.flow.explain import rank, rows
    from rlinf_embodied.flow.pricing import Pricer
    from rlinf_embodied.telemetry.tables import text_table

    config = compose_train(overrides)
    cluster = cluster_at_hand(config.cluster)
    if cluster.num_devices < 2:
        raise ConfigError("cluster.num_devices is 1, but one device has one plan: use a machine with two")
    shown = lambda what, done, total, remark: None if done < total else print(f"  {what} {remark}".rstrip())  # noqa: E731
    session = make_session(config.cluster)
    try:
        folder = starting_policy(config, session, cluster, shown)
        session.clear()
        workflow = training_workflow(config, str(folder))
        profile, _ = measured_profile(config, cluster, workflow, session, shown)
        pricer = Pricer(as_measured(workflow, profile), profile, linked(cluster, profile))
        ranked, _ = rank(pricer)
        print(text_table(rows(ranked)), flush=True)
        found = candidates(config, overrides, pricer, replace(ranked[0].plan, name="auto"))
        _alternate(config, str(folder), found, session, iterations)
    finally:
        session.close()
    return found


def candidates(config: TrainConfig, overrides: Sequence[str], pricer, auto: Plan) -> dict[str, Candidate]:
    """Returns every preset that fits, by name, and the plan that was picked."""
    from rlinf_embodied.flow.drift import predict
    from rlinf_embodied.flow.plan import resolve

    found = {}
    for name in choices("plan"):
        preset = compose_train([*overrides, f"plan={name}"]).plan
        if preset.is_auto:
            continue
        try:
            plan = resolve(name, preset.trees, pricer.cluster.num_devices, pricer.workflow)
        except PlanError as error:
            print(f"  {name}: {error}")
            continue
        found[name] = Candidate(plan, predict(pricer, plan))
    return found | {"auto": Candidate(auto, predict(pricer, auto))}


def _alternate(
    config: TrainConfig, folder: str, found: Mapping[str, Candidate], first: Session, iterations: int
) -> None:
    """Runs the candidates' iterations in turn, each with workers of its own; `first` lends its workers to one.

    Every worker takes a book-keeping CPU of Ray, and there are eight at least: enough for four candidates on two
    devices, but not for idle workers beside them.
    """
    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.embodied.trainer import make_session
    from rlinf_embodied.embodied.workflow import run_iteration, training_workflow
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.runtime.host import Tick

    workflow, cluster = training_workflow(config, folder), cluster_at_hand(config.cluster)
    sessions: list[Session] = []  # beside the first one, whose owner closes it
    executors: dict[str, Executor] = {}
    try:
        for name, candidate in found.items():
            if executors:
                sessions.append(make_session(config.cluster))
            executors[name] = Executor(workflow, candidate.plan, sessions[-1] if sessions else first, cluster)
        # the iterations before do not count: what is done once is done then
        for number in range(max(1, workflow.typical_iteration) + iterations):
            for name in sorted(executors, reverse=bool(number % 2)):
                start = time.perf_counter()
                run_iteration(executors[name], number)
                if number >= max(1, workflow.typical_iteration):
                    found[name].seconds.append(time.perf_counter() - start)
        for name, executor in executors.items():
            found[name].digest = str(executor.call("actor", "weights_digest", Tick(0))[0])
    finally:
        for session in sessions:
            session.close()


# --------------------------------------------------------------------------------------------------------------- report
def verdict(found: Mapping[str, Candidate]) -> tuple[bool, str]:
    """Returns whether the picked plan is the fastest (or as good as it), and how that is meant."""
    measured = {name: Spread.of(candidate.seconds) for name, candidate in found.items()}
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


def lines_of(case: str, found: Mapping[str, Candidate]) -> list[tuple[str, ...]]:
    """Returns a row per plan."""
    rows = []
    for name, candidate in found.items():
        seconds = Spread.of(candidate.seconds)
        said = verdict(found)[1] if name == "auto" else ""
        rows.append(
            (case, name, f"{candidate.predicted.iteration_s:.2f}", f"{seconds:.2f}", f"{candidate.error:+.1%}", said)
        )
    return rows


HEADER = ("workload", "plan", "predicted, s", "measured, s", "error", "the picked plan is")


def write_report(out: str, results: Mapping[str, Mapping[str, Candidate]], content: Mapping[str, object]) -> None:
    """Writes JSON, a Markdown table, and the scatter plot of predictions."""
    write_results(out, content)
    if not out:
        return
    rows = [row for case, found in results.items() for row in lines_of(case, found)]
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, tuple("---" for _ in HEADER), *rows)]
    arguments = " ".join(str(a) for a in content["arguments"]) if isinstance(content["arguments"], list) else ""
    text = ["# plan=auto, measured", "", f"`python experiments/bench_auto.py {arguments}`", "", *lines, ""]
    text += [f"{key}: {content[key]}" for key in ("median_error", "worst_error")]
    Path(out).with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    _scatter(Path(out).with_suffix(".png"), results)


def _scatter(path: Path, results: Mapping[str, Mapping[str, Candidate]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for case, found in results.items():
        points = [(c.predicted.iteration_s, Spread.of(c.seconds).median) for c in found.values()]
        axes.plot(*zip(*points, strict=True), "o", label=case, alpha=0.8)
    low, high = axes.get_xlim()[0], max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([low, high], [low, high], color="0.5", lw=1)
    axes.fill_between([low, high], [0.88 * low, 0.88 * high], [1.12 * low, 1.12 * high], color="0.9", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="predicted, s per iteration", ylabel="measured, s per iteration")
    axes.set_title("band: 12 %")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def summary(results: Mapping[str, Mapping[str, Candidate]]) -> dict[str, object]:
    """Returns the errors over all plans and the verdicts by workload."""
    errors = [abs(c.error) for found in results.values() for c in found.values()]
    plans = {
        case: {
            name: {
                "predicted_s": c.predicted.iteration_s,
                "stages_s": dict(c.predicted.stages_s),
                "measured_s": Spread.of(c.seconds),
                "error": c.error,
                "tree": c.plan.to_dict()["tree"],
                "weights_sha256": c.digest,
            }
            for name, c in found.items()
        }
        for case, found in results.items()
    }
    return {
        "median_error": Spread.of(errors).median,
        "worst_error": max(errors),
        "verdicts": {case: verdict(found)[1] for case, found in results.items()},
        "weights_equal": all(len({c.digest for c in found.values()}) == 1 for found in results.values()),
        "workloads": plans,
    }


def main(arguments: Sequence[str]) -> int:
    try:
        own, overrides = split_arguments(arguments, OWN)
        cases = chosen(str(own["cases"]), CASES)
        for case in cases.values():
            compose_train([*case, *overrides])  # typing errors cost no measurement
        use_one_thread_per_process()
        before, results = machine(), {}
        for case, words in cases.items():
            print(f"{case}: {' '.join(words)}", flush=True)
            results[case] = run_case([*words, *overrides], int(str(own["iterations"])))
            print(table(HEADER, lines_of(case, results[case])), flush=True)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = summary(results)
    print(table(HEADER, [row for case, plans in results.items() for row in lines_of(case, plans)]))
    print(f"errors of the predictions: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
    content = {"benchmark": "auto", "arguments": list(arguments), "machine": before}
    write_report(str(own["out"]), results, content | found)
    return 0 if all(verdict(plans)[0] for plans in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
