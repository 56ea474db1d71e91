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

from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_embodied.command_line import main
from rlinf_embodied.config import MemoryConfig, PlanningConfig, Precision
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import linked, workflow_for
from rlinf_embodied.tools.plans import (
    find_cluster,
    find_model,
    find_profile,
    show_plans,
    write_plans,
    write_tables,
)

if TYPE_CHECKING:
    from rlinf_embodied.tools.memory import PolicyShape


def plan(config: PlanningConfig) -> None:
    if config.model is not None:
        return plan_memory(config.model, config)
    profile, cluster = find_profile(config), find_cluster(config.cluster)
    if config.cluster == "local":
        cluster = linked(cluster, profile)
    workflow = workflow_for(profile, config.workflow)
    pricer = Pricer(workflow, profile, cluster)
    ranking = rank(pricer, config.num_ranked, max_staleness=config.max_staleness)
    show_plans(ranking, pricer)
    folder = Path(config.run.dir or f"runs/plan-{profile.name}-{cluster.name}")
    write_plans(folder, ranking, pricer)
    print(f"{folder}/plan.json, plan.png, trace.json")
    return None


def plan_memory(name: str, config: PlanningConfig) -> None:
    path = find_model(name).resolve()
    model = path.parent.name if path.stem == "config" else path.stem
    folder = Path(config.run.dir or f"runs/memory-{model}")
    from rlinf_embodied.tools.memory import memory_tables

    write_tables(folder, "memory", memory_tables(model, memory_shapes(path, config.memory), config.memory))
    print(f"{folder}/memory.json, memory.md")


def memory_shapes(path: Path, memory: MemoryConfig) -> "dict[str, PolicyShape]":
    """Returns the policy under each way to train it, counted on torch's meta device."""
    import torch

    from policies.openvla import footprint as openvla
    from policies.smolvla import footprint as smolvla
    from rlinf_embodied.tools.memory import policy_shape

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
    main(plan, PlanningConfig)
