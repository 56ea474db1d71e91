"""Plans a workflow on a cluster without running it: the ranked plans, their bottlenecks, and why each lost.

python experiments/plan.py profile=maniskill_openvla cluster=h100x64
python experiments/plan.py profile=runs/mine/profile.json cluster=local run.dir=runs/plan
python experiments/plan.py profile=grpo_llm cluster=h100x8 max_staleness=1
python experiments/plan.py model=openvla_7b
python experiments/plan.py model=pi05    # or pi0, smolvla
python experiments/plan.py model=qwen2_5_7b memory.tokens=16384    # or qwen2_5_1_5b, or a language model's folder

Writes plan.json (for plan=<file>), plan.png (a Gantt chart of the simulated iteration) and trace.json (for Perfetto).
With model=, no stage is planned: the command counts the memory that weights, gradients and optimizer take in training
and rollouts, without loading weights, and writes the table to memory.md.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_embodied.command_line import main
from rlinf_embodied.config import LanguagePolicyConfig, MemoryConfig, PlanningConfig, Precision
from rlinf_embodied.planning.explain import LONG_COLUMNS, Ranking, rank, rows
from rlinf_embodied.planning.notation import to_dict
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import load_profile, workflow_for
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.telemetry.plots import gantt
from rlinf_embodied.telemetry.tables import described_table, markdown_table, text_table
from rlinf_embodied.telemetry.trace import write_trace
from rlinf_embodied.tools.plans import find_cluster, find_file, find_profile

if TYPE_CHECKING:
    from torch import nn

    from policies.causal_lm import CausalLM

_KNOWN = "give the config.json of an OpenVLA, a pi0, pi0.5 or SmolVLA, or of a causal language model"
_MOST_ROWS = 16  # of a chart that can be read


def plan(config: PlanningConfig) -> list[dict[str, str]]:
    """Writes and prints the table of plans, or of a model's memory, and returns its rows."""
    if config.model is not None:
        return plan_memory(config.model, config)
    profile, cluster = find_profile(config), find_cluster(config.cluster)
    workflow = workflow_for(profile)
    pricer = Pricer(workflow, profile, cluster)
    ranking = rank(pricer, config.num_ranked, max_staleness=config.max_staleness, search_s=config.search_s)
    report_plans(Path(config.run.dir or f"runs/plan-{profile.name}-{cluster.name}"), ranking, pricer)
    return rows(ranking.plans)


def report_plans(folder: Path, ranking: Ranking, pricer: Pricer) -> None:
    """Prints the table; writes the best plan as plan.json, its simulated iteration as plan.png and trace.json."""
    where = f"{pricer.workflow.name} on {pricer.cluster.name} ({pricer.cluster.description})"
    title = f"{where}, profile {pricer.profile.name}: predicted"
    print(described_table(rows(ranking.plans), LONG_COLUMNS, title))
    print("a > b: a's calls before b's; a | b: on different devices, streaming; a+b: on the same devices")
    print(*ranking.remarks, f"{folder}/plan.json, plan.png, trace.json", sep="\n")
    folder.mkdir(parents=True, exist_ok=True)
    best = ranking.best
    described = {
        **to_dict(best.plan),
        "predicted_s_per_iteration": best.iteration_s,
        "profile": pricer.profile.name,
        "cluster": pricer.cluster.name,
        "ranked": rows(ranking.plans),
        "remarks": ranking.remarks,
    }
    (folder / "plan.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    spans = simulate(best.plan, pricer, traced=True).spans
    if pricer.cluster.num_devices > _MOST_ROWS:  # a stage's first device stands for all of them
        first = {stage: place.devices[0] for stage, place in best.plan.places().items()}
        spans = [span for span in spans if span.worker == first[span.stage]]
    write_trace(folder / "trace.json", spans)
    title = f"{pricer.workflow.name} on {pricer.cluster.name}: {best.label}, predicted"
    gantt(title, spans).savefig(folder / "plan.png", dpi=120)


def plan_memory(name: str, config: PlanningConfig) -> list[dict[str, str]]:
    place, memory = Path(name).expanduser(), config.memory
    path = (place / "config.json" if place.is_dir() else find_file("model", name, "models", (".json",))).resolve()
    model = path.parent.name if path.stem == "config" else path.stem
    folder = Path(config.run.dir or f"runs/memory-{model}")
    from policies.causal_lm import CausalLM
    from rlinf_embodied.tools.memory import ModelSize, memory_table, pass_bytes

    sizes, counted = dict[str, ModelSize](), dict[str, float]()
    for method, one in meta_models(path, memory).items():
        sizes[method] = ModelSize.of(one.module if isinstance(one, CausalLM) else one)
        if isinstance(one, CausalLM):  # gradients have a column of their own
            gradients = sum(p.numel() * p.element_size() for p in one.parameters())
            counted[method] = pass_bytes(one, memory.tokens) - gradients
    counts = ", ".join(
        f"{method}: {size.num_trained:,} of {size.num_parameters:,} parameters" for method, size in sizes.items()
    )
    profile = None if memory.profile is None else load_profile(Path(memory.profile))
    title = f"{model} ({counts} are trained): GB of a device of {memory.device_gb:g}"
    table = memory_table(sizes, memory, profile, counted or None)
    print(text_table(table, title))
    page = markdown_table(list(table[0]), [list(row.values()) for row in table])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.md").write_text(f"{title}\n\n{page}\n", encoding="utf-8")
    print(f"{folder}/memory.md")
    return table


def meta_models(path: Path, memory: MemoryConfig) -> "dict[str, nn.Module | CausalLM]":
    """Returns the model of a config.json under each way to train it, on torch's meta device."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from policies.adapters import inject_adapters
    from policies.causal_lm import CausalLM
    from policies.checkpoint_folder import read_json
    from policies.openvla.config import config_of
    from policies.openvla.folder import empty_network
    from policies.pi.config import Family, read_config
    from policies.pi.folder import BACKBONE
    from policies.pi.network import new_network
    from policies.text_codec import TextCodec, char_tokenizer

    raw = read_json(path, _KNOWN)
    found: dict[str, nn.Module | CausalLM] = {}
    dtype = torch.bfloat16 if memory.precision is Precision.bfloat16 else torch.float32
    is_flow = raw.get("type") in set(Family)
    is_language = raw.get("model_type") in CONFIG_MAPPING and raw["model_type"] != "openvla"
    adapters = {f"LoRA, rank {memory.lora.rank}": memory.lora} if memory.lora.rank else {}
    for name, lora in ({"expert": None, "full": None} if is_flow else {"full": None, **adapters}).items():
        with torch.device("meta"):
            if is_flow:
                flow = new_network(read_config(path, path.parent / BACKBONE)).requires_grad_(False)
                for parameter in flow.trained(language=name == "full", vision=name == "full"):
                    parameter.requires_grad_(True)
                found[name] = flow.to(dtype)
            elif is_language:
                model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[raw["model_type"]](**raw), dtype=dtype)
                adapters_of = {} if lora is None else {"lora": lora}
                settings = LanguagePolicyConfig(packing=False, checkpoint_activations=True, **adapters_of)
                found[name] = CausalLM(model, TextCodec(char_tokenizer(), None), settings)
            else:
                found[name] = network = empty_network(config_of(raw, str(path))).to(dtype)
                if lora is not None:
                    inject_adapters(network, lora, 0, "memory.lora")
    return found


if __name__ == "__main__":
    main(plan, PlanningConfig)
