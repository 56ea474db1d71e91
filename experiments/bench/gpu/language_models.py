"""Short trainings of the reasoning workflow on one device."""

from __future__ import annotations

import time
from pathlib import Path

from experiments.bench.harness.trainings import in_this_process, iterations, job_of, starting_folder, weights_of
from policies.causal_lm import CausalLM
from rlinf_embodied.compose import compose_math
from rlinf_embodied.reasoning.workflow import training_workflow

SHORT = (  # sums that 200 steps of fine-tuning make solvable now and then
    "data.level=sum1-2-9",
    "plan=collocated",
    "warm_start.steps=200",
    "warm_start.num_examples=2048",
    "generation.max_new_tokens=24",
    "policy.context_length=48",
)
SHARDED = ("algorithm.sharding=fsdp2", "run.exact=false")
ADAPTERS = ("policy.precision=bfloat16", "policy.lora.rank=8", "run.exact=false")
LARGE = (  # 0.15 billion parameters with a critic of the same size
    "algorithm=ppo",
    "algorithm.critic_warmup_iterations=0",
    "algorithm.tokens_per_microbatch=16384",
    "policy.hidden_size=1024",
    "policy.num_layers=12",
    "policy.num_heads=16",
    "policy.intermediate_size=2816",
    "policy.context_length=128",
    "generation.max_new_tokens=64",
    "generation.rows_per_batch=256",
    "generation.max_num_seqs=256",
)


def fine_tuned() -> str:
    """Returns the folder of a small model that a CPU fine-tuned, or found in the cache."""
    return starting_folder(compose_math(SHORT), in_process=True)


def random_model(folder: Path, overrides: tuple[str, ...]) -> str:
    """Writes a model of random weights and returns its folder."""
    CausalLM.tiny(compose_math([*SHORT, *overrides]).policy, seed=0).save(folder)
    return str(folder)


def trained(kind: str, folder: str, overrides: tuple[str, ...] = (), count: int = 3) -> dict[str, object]:
    """Trains a model folder for some iterations on one device.

    Returns:
        "weights" on the CPU, "seconds" and "tokens_per_s" of the last iteration, "mismatch": the largest difference of
        log-probs between generation and training, over all iterations.
    """
    config = compose_math([*SHORT, f"policy.folder={folder}", *overrides])
    with in_this_process(training_workflow(config, folder), config.plan.variants, kind) as executor:
        mismatch, seconds, tokens, start = 0.0, 0.0, 0.0, time.perf_counter()
        for _, metrics in iterations(job_of(config), executor, count):
            seconds, tokens = time.perf_counter() - start, metrics["rollout/tokens"]
            mismatch = max(mismatch, metrics["losses/mismatch_max"])
            start = time.perf_counter()
        found = {"weights": weights_of(executor), "seconds": seconds}
        return {**found, "tokens_per_s": tokens / seconds, "mismatch": mismatch}
