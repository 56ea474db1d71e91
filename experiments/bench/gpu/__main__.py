"""Every check and measurement that needs a GPU, in one call.

python -m experiments.bench.gpu [out=docs/results/gpu.json] [only=physics,same,...] [overrides of train_vla.py]

    physics   physx_cuda env: steps/s over N rows, and whether a row that ends freezes
    same      two iterations of PPO on the toy env, whose physics is that of the CPU: largest difference of any weight
              between CPU and CUDA, and the ratio at the start on both
    small     seconds of an update of the small VLA in PPO on the toy env: on a core, and on CUDA with a pass per block
              (algorithm.reduction=exact) and with one pass for all blocks (the default there)
    language  three iterations of GRPO on a small language model: largest difference of any weight between CPU and CUDA,
              between FSDP2 (one process, nccl) and none, log-probs of generation against training's, in float32 and
              with adapters on bfloat16 weights; tokens/s of PPO with 0.15 billion parameters and as many of a critic
    rollout   OpenVLA with 7.5 billion random weights in bfloat16: actions/s and MFU, token by token and a chunk at once
    lora      the same network, adapters of rank 32 on all layers: samples/s and MFU of an update
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from experiments.bench.gpu.openvla import published, rollouts, training
from experiments.bench.harness import Benchmark, Run, chosen
from experiments.bench.harness.trainings import in_this_process, iterations, job_of, starting_folder, weights_of
from policies.causal_lm import CausalLM
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.workflow import training_workflow as language_workflow
from rlinf_embodied.telemetry.trace import busy_seconds

TOY = """env=point_reach plan=collocated env.num_envs=32 policy.options.hidden_size=32 policy.options.num_layers=1
    policy.options.num_heads=2 policy.options.stem_width=16 policy.options.keypoints=4
    algorithm.critic_warmup_iterations=0 algorithm.target_kl=null"""
UPDATES = """env=point_reach plan=collocated algorithm=ppo_finetune algorithm.critic_warmup_iterations=0
    algorithm.target_kl=null algorithm.ratio_tolerance=1e-2"""
SMALL = {
    "a core": ("cpu",),
    "a pass per block": ("cuda", "algorithm.reduction=exact"),
    "one pass": ("cuda",),
}
# sums that 200 steps of fine-tuning make solvable now and then
SHORT = """data.level=sum1-2-9 plan=collocated warm_start.steps=200 warm_start.num_examples=2048
    generation.max_new_tokens=24 policy.context_length=48"""
SHARDED = "algorithm.sharding=fsdp2 run.exact=false"
ADAPTERS = "policy.precision=bfloat16 policy.lora.rank=8 run.exact=false"
# 0.15 billion parameters with a critic of the same size
LARGE = """algorithm=ppo algorithm.critic_warmup_iterations=0 algorithm.tokens_per_microbatch=16384
    policy.hidden_size=1024 policy.num_layers=12 policy.num_heads=16 policy.intermediate_size=2816
    policy.context_length=128 generation.max_new_tokens=64 generation.rows_per_batch=256
    generation.max_num_seqs=256"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    out: str = ""
    only: str = ""


# --------------------------------------------------------------------------------------------------------------- checks
def physics(config: TrainConfig) -> dict[str, object]:
    results: dict[str, object] = {}
    for rows in (64, 512, 2048):
        env = make_env(dataclasses.replace(config.env, options=config.env.options | {"backend": "gpu"}), rows, "cuda:0")
        env.reset(range(rows))
        seeds = list(range(rows, 2 * rows))
        start, steps = time.perf_counter(), 0
        for _ in range(2 * env.spec.horizon // env.spec.chunk):
            actions = torch.rand(rows, env.spec.chunk, env.spec.action_dim, device="cuda:0") * 2 - 1
            steps += int(env.step_chunk(actions, seeds).valid.sum())
        seconds = time.perf_counter() - start
        env.reset(range(rows))
        for _ in range(env.spec.horizon // env.spec.chunk):
            env.step_chunk(torch.zeros(rows, env.spec.chunk, env.spec.action_dim, device="cuda:0"))
        frozen = all(episode is None for episode in env.running())
        seen = env.reset(range(rows // 2), rows=range(rows // 2)).proprio[rows // 2 :]
        shown = env.step_chunk(torch.ones(rows, env.spec.chunk, env.spec.action_dim, device="cuda:0")).observation
        results[f"{rows} rows"] = {
            "env_steps_per_s": steps / seconds,
            "all_rows_froze_at_the_horizon": frozen,
            "rows_at_rest_show_where_they_came_to_rest": torch.equal(seen, shown.proprio[rows // 2 :]),
        }
        env.close()
    return results


def trained_toy(kind: str) -> tuple[dict[str, Tensor], float]:
    """Returns (weights on the CPU, largest log-ratio at the start) after two iterations on a kind of device."""
    config = compose_train(TOY.split())
    with tempfile.TemporaryDirectory() as folder:
        policy = load_target(config.policy._target_)(config.policy, make_env(config.env, 1, "cpu").spec, 0)
        save_policy(cast(Policy, policy), Path(folder), config.env, config.policy)
        with in_this_process(training_workflow(config, folder), config.plan.variants, kind) as executor:
            ratios = [metrics["losses/initial_log_ratio"] for _, metrics in iterations(job_of(config), executor, 2)]
            return weights_of(executor), max(ratios)


def same(config: TrainConfig) -> dict[str, object]:
    (here, here_ratio), (there, there_ratio) = trained_toy("cpu"), trained_toy("cuda")
    return compared(here, there) | {"cpu_initial_log_ratio": here_ratio, "cuda_initial_log_ratio": there_ratio}


def small(config: TrainConfig) -> dict[str, object]:
    return {name: update_seconds(*on) for name, on in SMALL.items()}


def update_seconds(kind: str, overrides: str = "", count: int = 4) -> list[float]:
    """Returns the learner's seconds in each of some iterations of PPO, from a new policy; the first warms up."""
    config = compose_train([*f"{UPDATES} {overrides}".split()])
    with tempfile.TemporaryDirectory() as folder:
        policy = load_target(config.policy._target_)(config.policy, make_env(config.env, 1, "cpu").spec, 0)
        save_policy(cast(Policy, policy), Path(folder), config.env, config.policy)
        with in_this_process(training_workflow(config, folder), config.plan.variants, kind) as executor:
            results = [busy_seconds(result.spans) for result, _ in iterations(job_of(config), executor, count)]
    return [sum(seconds for (_, stage), seconds in busy.items() if stage == "actor") for busy in results]


def compared(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> dict[str, object]:
    """Returns the largest difference between two sets of weights, and where it is."""
    differences = {name: float((here[name] - there[name]).abs().max()) for name in here if here[name].numel()}
    worst = max(differences, key=differences.__getitem__)
    return {"max_abs_weight_difference": differences[worst], "where": worst}


def trained_language(kind: str, folder: str, overrides: str = "", count: int = 3) -> dict[str, object]:
    """Trains a model folder for some iterations on one device.

    Returns:
        "weights" on the CPU, "seconds" and "tokens_per_s" of the last iteration, "mismatch": the largest difference of
        log-probs between generation and training, over all iterations.
    """
    config = compose_math([*SHORT.split(), f"policy.folder={folder}", *overrides.split()])
    with in_this_process(language_workflow(config, folder), config.plan.variants, kind) as executor:
        mismatch, seconds, tokens, start = 0.0, 0.0, 0.0, time.perf_counter()
        for _, metrics in iterations(job_of(config), executor, count):
            seconds, tokens = time.perf_counter() - start, metrics["rollout/tokens"]
            mismatch = max(mismatch, metrics["losses/mismatch_max"])
            start = time.perf_counter()
        found = {"weights": weights_of(executor), "seconds": seconds}
        return {**found, "tokens_per_s": tokens / seconds, "mismatch": mismatch}


def language_on(kind: str) -> dict[str, object]:
    """Returns the results of short trainings of a language model on a kind of device, compared with the CPU's."""
    start = starting_folder(compose_math(SHORT.split()), in_process=True)  # fine-tuned by a CPU, or in the cache
    runs = {
        "cpu": trained_language("cpu", start),
        kind: trained_language(kind, start),
        "sharded": trained_language(kind, start, SHARDED),
        "adapters": trained_language(kind, start, ADAPTERS),
    }
    if kind != "cpu":  # hours there
        with tempfile.TemporaryDirectory() as folder:
            config = compose_math(f"{SHORT} {LARGE}".split()).policy
            CausalLM.from_config(config, None, 0).save(Path(folder))  # random weights
            runs["large"] = trained_language(kind, folder, LARGE)
    weights = {name: cast("dict[str, Tensor]", run.pop("weights")) for name, run in runs.items()}
    differences = {f"cpu against {kind}": compared(weights["cpu"], weights[kind])}
    differences["sharded against not"] = compared(weights[kind], weights["sharded"])
    return {**runs, **differences}


CHECKS = {
    "physics": physics,
    "same": same,
    "small": small,
    "language": lambda config: language_on("cuda"),
    "rollout": lambda config: rollouts(published(), "cuda:0"),
    "lora": lambda config: training(published(), "cuda:0"),
}


def measure(run: Run[Options]) -> int:
    """Runs the checks; one that is broken does not hide the others."""
    checks = chosen(run.options.only, CHECKS, "only")
    config = compose_train(["plan=collocated", *run.overrides])
    results: dict[str, object] = {}
    failed = False
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device, which all checks need: run them on a machine with one")
    for name, check in checks.items():
        try:
            results[name] = check(config)
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            traceback.print_exc()
            results[name], failed = {"failed": f"{type(error).__name__}: {error}"}, True
        print(f"{name}: {results[name]}", flush=True)
    run.write({"results": results})
    return int(failed)


BENCHMARK = Benchmark("gpu", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    BENCHMARK.main()
