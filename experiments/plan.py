"""Plans a workflow on a cluster without running it: the ranked plans, what binds each, and why it lost.

python experiments/plan.py profile=maniskill_openvla cluster=h100x64
python experiments/plan.py profile=runs/mine/profile.json cluster=local run.dir=runs/plan
python experiments/plan.py profile=grpo_llm cluster=h100x8 max_staleness=1
python experiments/plan.py model=openvla_7b
python experiments/plan.py model=smolvla

Writes plan.json (for plan=<file>), plan.png (a Gantt chart of the simulated iteration) and trace.json (for Perfetto).
With a model, no stage is planned: the memory of its training and rollouts is, without its weights, and what is printed
goes to memory.md and memory.json.
"""

import json
from pathlib import Path

from rlinf_embodied.command_line import planning_main
from rlinf_embodied.config import MemoryConfig, PlanningConfig, Precision
from rlinf_embodied.flow.explain import LONG_COLUMNS, Infeasible, Ranked, rank, rows
from rlinf_embodied.flow.measured import linked, workflow_for
from rlinf_embodied.flow.memory import PolicyShape
from rlinf_embodied.flow.memory_plan import GB, fit_rows, fits, term_rows
from rlinf_embodied.flow.pricing import Pricer
from rlinf_embodied.flow.simulate import simulate
from rlinf_embodied.planning_inputs import find_cluster, find_model, find_profile
from rlinf_embodied.telemetry.tables import described_table, markdown_table, terminal_width, text_table
from rlinf_embodied.telemetry.trace import write_gantt, write_trace

DRAWN_DEVICES = 16  # a chart with more rows cannot be read


def plan(config: PlanningConfig) -> None:
    if config.model is not None:
        return plan_memory(config.model, config)
    profile, cluster = find_profile(config), find_cluster(config.cluster)
    if config.cluster == "local":
        cluster = linked(cluster, profile)
    pricer = Pricer(
        workflow_for(profile, config.workflow), profile, cluster, overlap_in_worker=config.overlap_in_worker
    )
    ranked, impossible = rank(pricer, config.num_ranked, max_staleness=config.max_staleness)
    show(ranked, impossible, pricer)
    folder = Path(config.run.dir or f"runs/plan-{profile.name}-{cluster.name}")
    write(folder, ranked, impossible, pricer)
    print(f"{folder}/plan.json, plan.png, trace.json")
    return None


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
    spans = simulate(best.plan.tree, pricer, staleness=best.plan.staleness).spans
    if pricer.cluster.num_devices > DRAWN_DEVICES:  # a stage's first device stands for all of them
        first = {stage: leaf.devices[0] for stage, leaf in best.plan.leaves().items()}
        spans = [span for span in spans if span.worker == first[span.stage]]
    write_trace(folder / "trace.json", spans)
    write_gantt(folder / "plan.png", spans, f"{pricer.workflow.name} on {pricer.cluster.name}: {best.label}, predicted")


def plan_memory(name: str, config: PlanningConfig) -> None:
    path, memory = find_model(name).resolve(), config.memory
    shapes = memory_shapes(path, memory)
    arranged = {method: fits(shape, memory.num_devices, memory.rollout_rows) for method, shape in shapes.items()}
    room = memory.room_bytes
    found = [row for method, fit in arranged.items() for row in fit_rows(method, fit, memory.microbatch, room)]
    model = path.parent.name if path.stem == "config" else path.stem
    titles = {
        f"{model}: bytes, passes in {memory.precision.value}": term_rows(shapes),
        f"GB of the fullest device, of {room / GB:g}: passes of {memory.microbatch} rows, rollouts of "
        f"{memory.rollout_rows} rows": found,
    }
    for title, table in titles.items():
        print(text_table(table, title), end="\n\n")
    folder = Path(config.run.dir or f"runs/memory-{model}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.json").write_text(json.dumps(titles, indent=1) + "\n", encoding="utf-8")
    pages = [
        f"{title}\n\n{markdown_table(list(table[0]), [list(row.values()) for row in table])}"
        for title, table in titles.items()
    ]
    (folder / "memory.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    print(f"{folder}/memory.json, memory.md")


def memory_shapes(path: Path, memory: MemoryConfig) -> dict[str, PolicyShape]:
    """Returns the policy under each way to train it, counted on torch's meta device."""
    import torch

    from policies.openvla import footprint as openvla
    from policies.smolvla import footprint as smolvla
    from rlinf_embodied.learning.footprint import policy_shape

    dtype = torch.bfloat16 if memory.precision is Precision.bfloat16 else torch.float32
    if smolvla.is_smolvla(path):
        methods = {"expert": True, "full": False}
        found = {name: smolvla.footprint(path, dtype, memory.prompt_tokens, only) for name, only in methods.items()}
        return {name: policy_shape(policy) for name, policy in found.items()}
    ranks = {f"LoRA, rank {memory.lora_rank}": memory.lora_rank} if memory.lora_rank else {}
    shapes = {}
    for method, lora_rank in (ranks | {"full": 0}).items():
        network = openvla.meta_network(openvla.read_shapes(path), dtype, lora_rank, memory.lora_targets)
        shapes[method] = policy_shape(openvla.OpenVLAFootprint(network, memory.prompt_tokens, memory.action_tokens))
    return shapes


if __name__ == "__main__":
    planning_main(plan)
