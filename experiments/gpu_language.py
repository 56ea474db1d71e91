"""Short trainings of the reasoning workflow on one device, for bench_gpu.py."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor

from policies.causal_lm import CausalLM
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.learning.weights import WeightsMessage
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.warm_start import starting_policy
from rlinf_embodied.reasoning.workflow import training_workflow
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import SerialSession, of_type
from rlinf_embodied.training.job import Progress

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
    "generation.rows_together=256",
    "generation.num_slots=256",
)


def fine_tuned() -> Path:
    """Returns the folder of a small model that a CPU fine-tuned, or found in the cache."""
    config = compose_math(SHORT)
    return starting_policy(config, SerialSession(), Cluster("bench", "cpu", 1, 1, 0), lambda *progress: None)


def random_model(folder: Path, overrides: tuple[str, ...]) -> Path:
    """Writes a model of random weights and returns its folder."""
    CausalLM.tiny(compose_math([*SHORT, *overrides]).policy, seed=0).save(folder)
    return folder


def trained(kind: str, folder: Path, overrides: tuple[str, ...] = (), iterations: int = 3) -> dict[str, object]:
    """Trains a model folder for some iterations on one device.

    Returns:
        "weights" on the CPU, "seconds" and "tokens_per_s" of the last iteration, "mismatch": the largest difference of
        log-probs between generation and training, over all iterations.
    """
    config = compose_math([*SHORT, f"policy.folder={folder}", *overrides])
    session = SerialSession()
    try:
        return _trained(
            config, Executor(*_planned(config, folder), session, Cluster("bench", kind, 1, 1, 0)), iterations
        )
    finally:
        session.close()


def _planned(config: MathConfig, folder: Path):
    workflow = training_workflow(config, str(folder))
    return workflow, resolve("gpu", config.plan.trees, 1, workflow)


def _trained(config: MathConfig, executor: Executor, iterations: int) -> dict[str, object]:
    job, progress, mismatch, seconds, tokens = ReasoningJob(config), Progress(), 0.0, 0.0, 0.0
    for _ in range(iterations):
        start = time.perf_counter()
        metrics = job.run_iteration(executor, progress)[1]
        seconds, tokens = time.perf_counter() - start, metrics["rollout/tokens"]
        mismatch = max(mismatch, metrics["losses/mismatch_max"])
        progress.iteration += 1
    (message,) = of_type(executor.call("actor", "export_weights", Tick(iterations)), WeightsMessage)
    weights: dict[str, Tensor] = dict(message.tensors)
    return {"weights": weights, "seconds": seconds, "tokens_per_s": tokens / seconds, "mismatch": mismatch}
