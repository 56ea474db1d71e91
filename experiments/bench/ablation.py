"""The same work with each mechanism switched off in turn, for real on this machine and EMULATED on eight H100s.

python -m experiments.bench.ablation [where=local,emulated] [rounds=3] [iterations=2] [chunks=10]
                                     [profiles=ppo_llm,maniskill_openvla] [store_gb_per_s=2.0] [join=earlier.json]
                                     [out=docs/results/ablation] [overrides of train_vla.py]

    scheduler               a fixed plan in the place of the best one: collocated / disaggregated / hybrid, and
                            collocated / disaggregated / hybrid on the emulated cluster
    elastic pipelining      one chunk per edge and one shard per loop, then planned again
    context switching       everything resident: planned again
    adaptive communication  every edge through the object store: locally also between stages of one worker; emulated
                            only what crosses devices, at the store's rate

Locally, cases are run one after the other in the same workers, `rounds` times over in turn; of every case the first
iteration does not count.  Nothing is switched on a CPU, whose memory is the same before and after: that row is
emulated only.  Emulated stages sleep (planner/emulated.py); the object store's rate (store_gb_per_s=2.0) is an argument
there, since it is this machine's, not an H100 node's.  `join=<JSON of an earlier run>` keeps that one's rows of places
(local, a profile) that are not measured now.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from experiments.bench.harness import (
    Benchmark,
    Report,
    Run,
    Spread,
    Table,
    alternate,
    commands,
    earlier_results,
    joined,
    names_of,
)
from experiments.bench.harness.trainings import iterations, job_of, starting_folder, timed_iteration
from experiments.bench.planner.published import best_plan, frozen, pricer_of
from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import ClusterConfig, TrainConfig, TransportMode
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import PlanError
from rlinf_embodied.execution.emulation import Emulator
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile
from rlinf_embodied.planning_inputs import find_cluster
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.runtime.sessions import make_session
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.planning import Planning
from rlinf_embodied.workflow.graph import WHOLE, Workflow

DEVICES = 2
NEVER_S = 1e9  # how long a switch takes that may not be made
HEADER = ("where", "switched off", "plan", "s per iteration", "to all on", "note")
LOCAL = (  # mechanism that is off, case, plan, one shard, transport
    ("(all on)", "auto", "auto", False, TransportMode.adaptive),
    ("scheduler", "collocated", "collocated", False, TransportMode.adaptive),
    ("scheduler", "disaggregated", "disaggregated", False, TransportMode.adaptive),
    ("scheduler", "hybrid", "hybrid", False, TransportMode.adaptive),
    ("elastic pipelining", "disaggregated, 1 shard", "disaggregated", True, TransportMode.adaptive),
    ("elastic pipelining", "hybrid, 1 shard", "hybrid", True, TransportMode.adaptive),
    ("adaptive communication", "auto", "auto", False, TransportMode.object_store),
    ("adaptive communication", "collocated", "collocated", False, TransportMode.object_store),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    where: str = "local,emulated"
    rounds: int = 3
    iterations: int = 2
    chunks: int = 10
    profiles: str = "ppo_llm,maniskill_openvla"
    store_gb_per_s: float = 2.0
    join: str = ""
    out: str = ""


@dataclass(slots=True)
class Row:
    """A case and its seconds per iteration."""

    where: str
    mechanism: str
    case: str
    seconds: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def name(self) -> str:
        """Mechanism and case."""
        return f"{self.case}, {self.mechanism}"


def run_rows(rows: Sequence[tuple[Row, Callable[[], list[float]]]], rounds: int) -> list[Row]:
    """Fills the rows with what their calls give, in turn."""
    by_name = {row.name: (row, call) for row, call in rows}

    def said(number: int, name: str, seconds: list[float]) -> None:
        print(f"{by_name[name][0].where}, round {number + 1}/{rounds}: {name}: {seconds[-1]:.2f} s", flush=True)

    found = alternate({name: call for name, (_, call) in by_name.items()}, rounds, said=said)
    for name, several in found.items():
        by_name[name][0].seconds += [seconds for part in several for seconds in part]
    return [row for row, _ in rows]


# ---------------------------------------------------------------------------------------------------------------- local
def local_rows(config: TrainConfig, overrides: Sequence[str], rounds: int, count: int) -> list[Row]:
    """Trains every case for a few iterations, in turn."""
    workflow = training_workflow(config, starting_folder(config))
    session = make_session(config.cluster)
    try:
        auto, note = auto_plan(config, workflow, session)
        rows = []
        for mechanism, case, name, one_shard, transport in LOCAL:
            plan = auto if name == "auto" else preset(name, overrides, workflow, one_shard)
            row = Row("local", mechanism, case, note="" if rows else note)
            rows.append((row, partial(timed, config, workflow, plan, session, transport, count)))
        return run_rows(rows, rounds)
    finally:
        session.close()


def auto_plan(config: TrainConfig, workflow: Workflow, session: Session) -> tuple[Plan, str]:
    """Returns the plan that training would take, measured now or known from the cache."""
    cluster = cluster_at_hand(replace(config.cluster, num_devices=DEVICES))
    planning = Planning(EmbodiedJob(config), cluster, workflow)
    with tempfile.TemporaryDirectory() as folder:
        plan, _ = planning.choose(workflow, session, RunFolder(Path(folder)), lambda *_: None, 0)
    return plan, f"{plan.name}, predicted {planning.predicted_s or 0:.2f} s"


def preset(name: str, overrides: Sequence[str], workflow: Workflow, one_shard: bool) -> Plan:
    """Returns a plan of configs/plan on two devices."""
    found = compose_train([*overrides, f"plan={name}"]).plan
    text = json.dumps(found.variants)
    variants = json.loads(text.replace(" in 2 shards", "")) if one_shard else found.variants
    return resolve(name, variants, DEVICES, workflow)


def timed(
    config: TrainConfig, workflow: Workflow, plan: Plan, session: Session, transport: TransportMode, count: int
) -> list[float]:
    """Returns the seconds of some iterations from the same start; the first one warms up."""
    session.clear()
    cluster = cluster_at_hand(ClusterConfig(num_devices=DEVICES, transport=transport))
    steps = iterations(job_of(config), Executor(workflow, plan, session, cluster), 1 + count)
    return [timed_iteration(steps)[0] for _ in range(1 + count)][1:]


# ------------------------------------------------------------------------------------------------------------- emulated
def emulated_rows(names: Sequence[str], rounds: int, store_bytes_per_s: float) -> list[Row]:
    """Emulates every case on eight H100s, in turn."""
    session, rows = RaySession(), []
    try:
        for name in names:
            cases = [(row, pricer, best(pricer, kind, row)) for row, pricer, kind in cases_of(name, store_bytes_per_s)]
            calls = [(row, partial(emulated, pricer, plan, session)) for row, pricer, plan in cases if plan]
            run_rows(calls, rounds)
            rows += [row for row, *_ in cases]
    finally:
        session.close()
    return rows


def emulated(pricer: Pricer, plan: Plan, session: RaySession) -> list[float]:
    """Returns seconds per iteration."""
    return list(Emulator(pricer, session).run(plan, 1).measured_s)


def cases_of(name: str, store_bytes_per_s: float) -> list[tuple[Row, Pricer, Kind | None]]:
    """Returns (row, prices, kind of plan) for each mechanism."""
    where, cluster, profile = f"EMULATED {name}, 8 x H100", find_cluster("h100x8"), frozen(name)
    links = replace(
        cluster.links, within_node_bytes_per_s=store_bytes_per_s, across_nodes_bytes_per_s=store_bytes_per_s
    )
    plain, stored = pricer_of(profile, cluster), pricer_of(profile, replace(cluster, links=links))
    kinds = [(Row(where, "scheduler", kind.value), plain, kind) for kind in Kind]
    return [
        (Row(where, "(all on)", "auto"), plain, None),
        *kinds,
        (Row(where, "elastic pipelining", "auto"), one_chunk(plain), None),
        (Row(where, "context switching", "auto"), never_switched(profile, cluster), None),
        (Row(where, "adaptive communication", "auto"), stored, None),
    ]


def never_switched(profile: Profile, cluster: Cluster) -> Pricer:
    """Returns the prices where a switch takes too long for any plan that makes one."""
    stages = {key: replace(stage, offload_s=NEVER_S) for key, stage in profile.stages.items()}
    return pricer_of(replace(profile, stages=stages), cluster)


def one_chunk(pricer: Pricer) -> Pricer:
    """Returns the same case where data flows on when all of it is there, one shard in flight."""
    work = pricer.workflow
    edges = tuple(replace(edge, granularities=(WHOLE,)) for edge in work.edges)
    loops = {key: replace(loop, shards=(1,)) for key, loop in work.loops.items()}
    return Pricer(replace(work, edges=edges, loops=loops), pricer.profile, pricer.cluster)


def best(pricer: Pricer, kind: Kind | None, row: Row) -> Plan | None:
    """Returns the best plan of a kind; None, with the reason in the row's note, where none fits."""
    try:
        plan, iteration_s = best_plan(pricer, kind)
    except PlanError as error:
        row.note = f"infeasible: {error}"
        return None
    fits = iteration_s < NEVER_S
    row.note = plan.name if fits else "infeasible: nothing fits without switching"
    return plan if fits else None


# --------------------------------------------------------------------------------------------------------------- report
def lines_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns the rows as they are shown; ratios are to the same place's row with everything on."""
    base = {row.where: Spread.of(row.seconds).median for row in rows if row.mechanism == "(all on)"}
    lines = []
    for row in rows:
        seconds = Spread.of(row.seconds) if row.seconds else None
        shown = (f"{seconds:.2f}", f"{seconds.median / base[row.where]:.2f}") if seconds else ("-", "-")
        lines.append((row.where, row.mechanism, row.case, *shown, row.note))
    return lines


def measure(run: Run[Options]) -> Report:
    """Measures the places that were asked for and joins them with earlier rows."""
    own, rows = run.options, []
    earlier = earlier_results(own.join, "ablation")
    if "local" in names_of(own.where):
        overrides = [f"env.chunks_per_rollout={own.chunks}", *run.overrides]
        rows += local_rows(compose_train(overrides), overrides, own.rounds, own.iterations)
    if "emulated" in names_of(own.where):
        rows += emulated_rows(names_of(own.profiles), own.rounds, own.store_gb_per_s * 1e9)
    measured = {row.where for row in rows}
    kept = [Row(**row) for row in earlier.get("rows", ()) if row["where"] not in measured]
    known = joined(run.known, earlier, list(dict.fromkeys(row.where for row in kept)))
    table = Table(HEADER, lines_of([*kept, *rows]))
    page = ["# Each mechanism switched off in turn", "", commands("ablation", known), "", table.markdown()]
    content = {**known, "rows": [asdict(row) for row in (*kept, *rows)]}
    return Report(content=content, text=str(table), markdown="\n".join(page))


BENCHMARK = Benchmark("ablation", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
