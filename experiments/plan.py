"""Plans a workflow on a cluster without running it: the ranked plans, what binds each, and why it lost.

python experiments/plan.py profile=maniskill_openvla cluster=h100x64
python experiments/plan.py profile=runs/mine/profile.json cluster=local run.dir=runs/plan

Writes plan.json (for plan=<file>), plan.png (a Gantt chart of the simulated iteration) and trace.json (for Perfetto).
"""

import json
from pathlib import Path

from rlinf_embodied.command_line import planning_main
from rlinf_embodied.config import PlanningConfig
from rlinf_embodied.flow.explain import LONG_COLUMNS, Infeasible, Ranked, rank, rows
from rlinf_embodied.flow.measured import linked, workflow_for
from rlinf_embodied.flow.pricing import Pricer
from rlinf_embodied.flow.simulate import simulate
from rlinf_embodied.planning_inputs import find_cluster, find_profile
from rlinf_embodied.telemetry.tables import described_table, terminal_width
from rlinf_embodied.telemetry.trace import write_gantt, write_trace

DRAWN_DEVICES = 16  # a chart with more rows cannot be read


def plan(config: PlanningConfig) -> None:
    profile, cluster = find_profile(config), find_cluster(config.cluster)
    if config.cluster == "local":
        cluster = linked(cluster, profile)
    pricer = Pricer(
        workflow_for(profile, config.workflow), profile, cluster, overlap_in_worker=config.overlap_in_worker
    )
    ranked, impossible = rank(pricer, config.num_ranked)
    show(ranked, impossible, pricer)
    folder = Path(config.run.dir or f"runs/plan-{profile.name}-{cluster.name}")
    write(folder, ranked, impossible, pricer)
    print(f"{folder}/plan.json, plan.png, trace.json")


def show(ranked: list[Ranked], impossible: list[Infeasible], pricer: Pricer) -> None:
    cluster = pricer.cluster
    title = (
        f"{pricer.workflow.name} on {cluster.name} ({cluster.description}), profile {pricer.profile.name}: predicted"
    )
    print(described_table(rows(ranked), LONG_COLUMNS, title, terminal_width()))
    print("a > b by turns, a >> b by turns with offloading, a || b side by side")
    for entry in impossible:
        print(f"{entry.mode}: {entry.reason}")


def write(folder: Path, ranked: list[Ranked], impossible: list[Infeasible], pricer: Pricer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    best = ranked[0]
    described = {
        **best.plan.to_dict(),
        "predicted_s_per_iteration": best.iteration_s,
        "profile": pricer.profile.name,
        "cluster": pricer.cluster.name,
        "ranked": rows(ranked),
        "impossible": {str(entry.mode): entry.reason for entry in impossible},
    }
    (folder / "plan.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    every = pricer.cluster.num_devices <= DRAWN_DEVICES
    spans = simulate(best.plan.tree, pricer, every_device=every).spans
    write_trace(folder / "trace.json", spans)
    write_gantt(folder / "plan.png", spans, f"{pricer.workflow.name} on {pricer.cluster.name}: {best.shape}, predicted")


if __name__ == "__main__":
    planning_main(plan)
