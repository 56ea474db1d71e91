"""The same work with each mechanism switched off in turn, for real on this machine and EMULATED on eight H100s.

python experiments/ablate.py [where=local,emulated] [rounds=3] [iterations=2] [chunks=10] [out=docs/results/ablation]
                             [profiles=ppo_llm,maniskill_openvla] [join=earlier.json] [overrides of train_vla.py]

    scheduler               a fixed plan in the place of the best one: collocated / disaggregated / hybrid, and
                            temporal / spatial / hybrid on the emulated cluster
    elastic pipelining      one chunk per edge and one shard per loop, then planned again
    context switching       everything resident: planned again; if nothing fits, with half the items until it does
    adaptive communication  every edge through the object store: locally also between stages of one worker; emulated
                            only what crosses devices, at the store's rate

Locally, cases are run one after the other in the same workers, `rounds` times over in turn; of every case the first
iteration does not count.  Nothing is switched on a CPU, whose memory is the same before and after: that row is
emulated only.  Emulated stages sleep (bench_emulated.py); the object store's rate is an argument there, since it is
this machine's, not an H100 node's.  `join=<JSON of an earlier run>` keeps that one's rows of places (local, a profile)
that are not measured now.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench_report import (
    Spread,
    commands,
    earlier_results,
    joined,
    machine,
    markdown,
    split_arguments,
    table,
    use_one_thread_per_process,
    write_results,
)

from rlinf_embodied.compose import CONFIG_DIR, compose_train
from rlinf_embodied.config import TrainConfig, TransportMode
from rlinf_embodied.errors import PlanError, RlinfError

if TYPE_CHECKING:
    from rlinf_embodied.flow.plan import Plan
    from rlinf_embodied.flow.pricing import Pricer
    from rlinf_embodied.runtime.session import Session

OWN = {
    "where": "local,emulated",
    "rounds": 3,
    "iterations": 2,
    "chunks": 10,
    "profiles": "ppo_llm,maniskill_openvla",
    "store_gb_per_s": 2.0,
    "join": "",
    "out": "",
}
DEVICES = 2
NEVER_S = 1e9  # how long a switch takes that may not be made


@dataclass(slots=True)
class Row:
    """A case and its seconds per iteration (or per so many items: `share` of the full iteration's)."""

    where: str
    mechanism: str
    case: str
    seconds: list[float] = field(default_factory=list)
    note: str = ""


# ---------------------------------------------------------------------------------------------------------------- local
def local_rows(config: TrainConfig, overrides: Sequence[str], rounds: int, iterations: int) -> list[Row]:
    """Trains every case for a few iterations, in turn."""
    from bench_rollout import clone_of

    from rlinf_embodied.embodied.workflow import training_workflow
    from rlinf_embodied.runtime.sessions import make_session

    workflow = training_workflow(config, clone_of(config))
    rows = [
        (Row("local", "(all on)", "auto"), "auto", False, TransportMode.adaptive),
        (Row("local", "scheduler", "collocated"), "collocated", False, TransportMode.adaptive),
        (Row("local", "scheduler", "disaggregated"), "disaggregated", False, TransportMode.adaptive),
        (Row("local", "scheduler", "hybrid"), "hybrid", False, TransportMode.adaptive),
        (Row("local", "elastic pipelining", "disaggregated, 1 shard"), "disaggregated", True, TransportMode.adaptive),
        (Row("local", "elastic pipelining", "hybrid, 1 shard"), "hybrid", True, TransportMode.adaptive),
        (Row("local", "adaptive communication", "auto"), "auto", False, TransportMode.object_store),
        (Row("local", "adaptive communication", "collocated"), "collocated", False, TransportMode.object_store),
    ]
    session = make_session(config.cluster)
    try:
        auto, note = auto_plan(config, workflow, session)
        rows[0][0].note = note
        for number in range(rounds):
            for row, name, one_shard, transport in rows:
                plan = auto if name == "auto" else preset(name, overrides, workflow, one_shard)
                row.seconds += timed(workflow, plan, session, transport, iterations)
                print(f"round {number + 1}/{rounds}: {row.case}, {row.mechanism}: {row.seconds[-1]:.2f} s", flush=True)
    finally:
        session.close()
    return [row for row, *_ in rows]


def auto_plan(config: TrainConfig, workflow, session: Session) -> tuple[Plan, str]:
    """Returns the plan that training would take, measured now or known from the cache."""
    import tempfile

    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.embodied.job import EmbodiedJob
    from rlinf_embodied.telemetry.run_folder import RunFolder
    from rlinf_embodied.training.planning import Planning

    cluster = cluster_at_hand(replace(config.cluster, num_devices=DEVICES))
    planning = Planning(EmbodiedJob(config), cluster, workflow)
    with tempfile.TemporaryDirectory() as folder:
        plan, _ = planning.choose(workflow, session, RunFolder(Path(folder)), lambda *_: None, 0)
    return plan, f"{plan.name}, predicted {planning.predicted_s or 0:.2f} s"


def preset(name: str, overrides: Sequence[str], workflow, one_shard: bool) -> Plan:
    """Returns a plan of configs/plan on two devices."""
    from rlinf_embodied.flow.plan import resolve

    found = compose_train([*overrides, f"plan={name}"]).plan
    trees = json.loads(json.dumps(found.trees).replace('"shards": 2', '"shards": 1')) if one_shard else found.trees
    return resolve(name, trees, DEVICES, workflow)


def timed(workflow, plan: Plan, session: Session, transport: TransportMode, iterations: int) -> list[float]:
    """Returns the seconds of some iterations from the same start; the first one warms up."""
    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.config import ClusterConfig
    from rlinf_embodied.embodied.workflow import run_iteration
    from rlinf_embodied.execution.executor import Executor

    session.clear()
    cluster = cluster_at_hand(ClusterConfig(num_devices=DEVICES, transport=transport))
    executor = Executor(workflow, plan, session, cluster)
    seconds = []
    for number in range(1 + iterations):
        start = time.perf_counter()
        run_iteration(executor, number)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


# ------------------------------------------------------------------------------------------------------------- emulated
def emulated_rows(names: Sequence[str], rounds: int, store_bytes_per_s: float) -> list[Row]:
    """Emulates every case on eight H100s, in turn."""
    from rlinf_embodied.execution.emulation import Emulator
    from rlinf_embodied.runtime.ray_session import RaySession

    session = RaySession()
    rows = []
    try:
        for name in names:
            cases = [
                (row, pricer, best(pricer, mode, row)) for row, pricer, mode in emulated_cases(name, store_bytes_per_s)
            ]
            for _ in range(rounds):
                for row, pricer, plan in cases:
                    if plan is not None:
                        full = pricer.workflow.num_blocks * pricer.workflow.items_per_block
                        scale = workload_items(name) / full  # fewer items: more iterations for the same work
                        row.seconds += [s * scale for s in Emulator(pricer, session).run(plan, 1).measured_s]
                        print(f"EMULATED {name}: {row.mechanism}, {row.case}: {row.seconds[-1]:.1f} s", flush=True)
            rows += [row for row, *_ in cases]
    finally:
        session.close()
    return rows


def emulated_cases(name: str, store_bytes_per_s: float) -> list[tuple[Row, Pricer, str]]:
    """Returns (row, prices, mode of the search) for each mechanism."""
    from rlinf_embodied.planning_inputs import find_cluster

    where, cluster = f"EMULATED {name}, 8 x H100", find_cluster("h100x8")
    links = replace(
        cluster.links, within_node_bytes_per_s=store_bytes_per_s, across_nodes_bytes_per_s=store_bytes_per_s
    )
    plain = pricer_of(name, cluster)
    modes = [(Row(where, "scheduler", mode), plain, mode) for mode in ("temporal", "hybrid", "spatial")]
    resident, items = smaller_until_it_fits(name, cluster)
    note = "" if items == workload_items(name) else f"{items} of {workload_items(name)} items at a time"
    return [
        (Row(where, "(all on)", "auto"), plain, "any"),
        *modes,
        (Row(where, "elastic pipelining", "auto"), one_chunk(plain), "any"),
        (Row(where, "context switching", "auto", note=note), resident, "any"),
        (Row(where, "adaptive communication", "auto"), pricer_of(name, replace(cluster, links=links)), "any"),
    ]


def pricer_of(name: str, cluster, items: int | None = None, switching: bool = True) -> Pricer:
    """Returns the prices of a frozen profile; without switching, leaving the memory takes for ever."""
    from rlinf_embodied.flow.catalogue import workflow_for
    from rlinf_embodied.flow.pricing import Pricer
    from rlinf_embodied.flow.profile_file import load_profile

    profile = load_profile(CONFIG_DIR / "profiles" / f"{name}.json")
    assert profile.workload is not None
    if items is not None:
        profile = replace(profile, workload=replace(profile.workload, num_items=items))
    if not switching:
        stages = {key: replace(stage, park_s=NEVER_S) for key, stage in profile.stages.items()}
        profile = replace(profile, stages=stages)
    return Pricer(workflow_for(profile), profile, cluster)


def workload_items(name: str) -> int:
    """Returns the items of a full iteration."""
    from rlinf_embodied.flow.profile_file import load_profile

    workload = load_profile(CONFIG_DIR / "profiles" / f"{name}.json").workload
    assert workload is not None
    return workload.num_items


def smaller_until_it_fits(name: str, cluster) -> tuple[Pricer, int]:
    """Returns the prices for the largest halved workload of which some plan keeps everything resident."""
    from rlinf_embodied.flow.planner import find_plans

    items = workload_items(name)
    while True:
        pricer = pricer_of(name, cluster, items, switching=False)
        try:
            fits = find_plans(pricer)[0].iteration_s < NEVER_S
        except PlanError:
            fits = False
        if fits or items // 2 < 8 * pricer.workflow.items_per_block:
            return pricer, items
        items //= 2


def one_chunk(pricer: Pricer) -> Pricer:
    """Returns the same case where data flows on when all of it is there, one shard in flight."""
    from rlinf_embodied.flow.graph import WHOLE
    from rlinf_embodied.flow.pricing import Pricer

    work = pricer.workflow
    edges = tuple(replace(edge, granularities=(WHOLE,)) for edge in work.edges)
    loops = {key: replace(loop, shards=(1,)) for key, loop in work.loops.items()}
    return Pricer(replace(work, edges=edges, loops=loops), pricer.profile, pricer.cluster)


def best(pricer: Pricer, mode: str, row: Row) -> Plan | None:
    """Returns the best plan of a mode; None, with the reason in the row's note, where none fits."""
    from rlinf_embodied.flow.plan import Plan
    from rlinf_embodied.flow.planner import Mode, find_plans, plan_tree

    try:
        found = find_plans(pricer, Mode(mode))[0]
    except PlanError as error:
        row.note = f"infeasible: {error}"
        return None
    if found.iteration_s >= NEVER_S:
        row.note = "; ".join(part for part in (row.note, "infeasible: nothing fits without switching") if part)
        return None
    row.note = "; ".join(part for part in (row.note, found.draft.shape()) if part)
    return Plan(found.draft.shape(), pricer.cluster.num_devices, plan_tree(found, pricer))


# --------------------------------------------------------------------------------------------------------------- report
HEADER = ("where", "switched off", "plan", "s per iteration", "to all on", "note")


def lines_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns the rows as they are shown; ratios are to the same place's row with everything on."""
    base = {row.where: Spread.of(row.seconds).median for row in rows if row.mechanism == "(all on)"}
    lines = []
    for row in rows:
        seconds = Spread.of(row.seconds) if row.seconds else None
        shown = (f"{seconds:.2f}", f"{seconds.median / base[row.where]:.2f}") if seconds else ("-", "-")
        lines.append((row.where, row.mechanism, row.case, *shown, row.note))
    return lines


def write_report(out: str, lines: Sequence[tuple[str, ...]], content: Mapping[str, object]) -> None:
    """Writes <out>.json and <out>.md, unless `out` is empty."""
    if not out:
        return
    write_results(str(Path(out).with_suffix(".json")), content)
    text = ["# Each mechanism switched off in turn", "", commands("ablate.py", content), "", markdown(HEADER, lines)]
    Path(out).with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    try:
        own, overrides = split_arguments(arguments, OWN)
        earlier = earlier_results(str(own["join"]), "ablation")
        use_one_thread_per_process()
        run, rows = {"arguments": list(arguments), "machine": machine()}, []
        places = str(own["where"]).split(",")
        if "local" in places:
            overrides = [f"env.chunks_per_rollout={own['chunks']}", *overrides]
            rows += local_rows(
                compose_train(overrides), overrides, int(str(own["rounds"])), int(str(own["iterations"]))
            )
        if "emulated" in places:
            rate = float(str(own["store_gb_per_s"])) * 1e9
            rows += emulated_rows(str(own["profiles"]).split(","), int(str(own["rounds"])), rate)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measured = {row.where for row in rows}
    kept = [Row(**row) for row in earlier.get("rows", ()) if row["where"] not in measured]
    lines = lines_of([*kept, *rows])
    print(table(HEADER, lines))
    run = joined(run, earlier, list(dict.fromkeys(row.where for row in kept)))
    write_report(str(own["out"]), lines, {"benchmark": "ablation", **run, "rows": [asdict(r) for r in [*kept, *rows]]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
