"""Every check and measurement that needs a GPU, in one call; checks that cannot run here are skipped with the reason.

python -m experiments.bench.gpu [out=docs/results/gpu.json] [only=agrees,physics,...] [overrides of train_vla.py]

    agrees    log-probs of the same tokens on CPU and CUDA: largest difference
    physics   physx_cuda env: steps/s over N rows, and whether a row that ends freezes
    reduce    TorchGroup on nccl with one process per GPU (two GPUs): exact and fast sums against the CPU's
    same      two iterations of PPO on the toy env, whose physics is that of the CPU: largest difference of any weight
              between CPU and CUDA, and the ratio at the start on both
    language  three iterations of GRPO on a small language model: largest difference of any weight between CPU and CUDA,
              between FSDP2 (one process, nccl) and none, log-probs of generation against training's, in float32 and
              with adapters on bfloat16 weights; tokens/s of PPO with 0.15 billion parameters and as many of a critic
    rollout   OpenVLA with 7.5 billion random weights in bfloat16: actions/s and MFU, token by token and a chunk at once
    lora      the same network, adapters of rank 32 on all layers: samples/s and MFU of an update
    plans     PPO on the available devices: seconds of an iteration under each plan, predicted and measured
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from experiments.bench.auto import run_case
from experiments.bench.gpu.language_models import ADAPTERS, LARGE, SHARDED, fine_tuned, random_model, trained
from experiments.bench.gpu.member import member
from experiments.bench.gpu.openvla import published, rollouts, training
from experiments.bench.harness import Benchmark, Report, Run, chosen
from experiments.bench.harness.trainings import in_this_process, iterations, job_of, weights_of
from policies.tiny_vla import TinyVLA
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.interfaces.envs import PROPRIO, EnvSpec, Observation, features_of
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.plug_ins import load_target

TOY = (
    "env=point_reach",
    "plan=collocated",
    "env.num_envs=32",
    "policy.options.hidden_size=32",
    "policy.options.num_layers=1",
    "policy.options.num_heads=2",
    "policy.options.stem_width=16",
    "policy.options.keypoints=4",
    "algorithm.critic_warmup_iterations=0",
    "algorithm.target_kl=null",
)
PPO = (
    "env=maniskill_pick",
    "env.chunks_per_rollout=10",
    "warm_start.num_demos=24",
    "warm_start.epochs=2",
    "warm_start.head_epochs=4",
    "algorithm.critic_warmup_iterations=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    out: str = ""
    only: str = ""


class SkippedError(Exception):
    """A check that this machine cannot run, and why."""


def need_gpus(number: int) -> None:
    """Skips the check on a machine with fewer."""
    found = torch.cuda.device_count()
    if found < number:
        raise SkippedError(f"needs {number} CUDA device(s), found {found}")


def example(config: TrainConfig, rows: int) -> tuple[TinyVLA, Observation, Tensor]:
    """Returns a policy, what it sees of an env like PickCube's and what it is to have answered, on the CPU."""
    env, draw = config.env, torch.Generator().manual_seed(0)
    size = (env.obs_size, env.obs_size)
    features = features_of(dict.fromkeys(env.cameras, size), {PROPRIO: 19}, 44)
    policy = TinyVLA(config.policy, EnvSpec(env.task, rows, env.chunk, env.horizon, 7, features, "none"), seed=0)
    pictures = torch.randint(0, 256, (len(env.cameras), rows, *size, 3), dtype=torch.uint8, generator=draw)
    images = dict(zip(env.cameras, pictures, strict=True))
    proprio = torch.randn(rows, 19, generator=draw)
    tokens = torch.randint(0, policy.options.num_bins, (rows, env.chunk, 7), generator=draw)
    return policy, Observation({PROPRIO: proprio}, ("pick up the cube",) * rows, images), tokens


# --------------------------------------------------------------------------------------------------------------- checks
def agrees(config: TrainConfig) -> dict[str, object]:
    need_gpus(1)
    vla, observation, tokens = example(config, 64)
    score = lambda shown, chosen: vla.evaluate(vla.encode(shown), {"tokens": chosen}, config.policy.temperature)  # noqa: E731
    here = score(observation, tokens).log_probs
    vla.module.cuda()
    there = score(observation.to("cuda"), tokens.cuda()).log_probs
    return {"max_abs_log_prob_difference": float((here - there.cpu()).abs().max())}


def physics(config: TrainConfig) -> dict[str, object]:
    need_gpus(1)
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


def reduce(config: TrainConfig) -> dict[str, object]:
    need_gpus(2)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, 2, f"file://{folder}/meet", answers) for rank in range(2)]
        processes = [context.Process(target=member, args=each) for each in arguments]
        for process in processes:
            process.start()
        found = [answers.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    return {f"rank {rank}": {"exact_error": exact, "fast_error": fast} for rank, exact, fast in sorted(found)}


def trained_toy(kind: str) -> tuple[dict[str, Tensor], float]:
    """Returns (weights on the CPU, largest log-ratio at the start) after two iterations on a kind of device."""
    config = compose_train(TOY)
    with tempfile.TemporaryDirectory() as folder:
        policy = load_target(config.policy._target_)(config.policy, make_env(config.env, 1, "cpu").spec, 0)
        save_policy(cast(Policy, policy), Path(folder), config.env, config.policy)
        with in_this_process(training_workflow(config, folder), config.plan.variants, kind) as executor:
            ratios = [metrics["losses/initial_log_ratio"] for _, metrics in iterations(job_of(config), executor, 2)]
            return weights_of(executor), max(ratios)


def same(config: TrainConfig) -> dict[str, object]:
    need_gpus(1)
    (here, here_ratio), (there, there_ratio) = trained_toy("cpu"), trained_toy("cuda")
    return compared(here, there) | {"cpu_initial_log_ratio": here_ratio, "cuda_initial_log_ratio": there_ratio}


def compared(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> dict[str, object]:
    """Returns the largest difference between two sets of weights, and where it is."""
    differences = {name: float((here[name] - there[name]).abs().max()) for name in here if here[name].numel()}
    worst = max(differences, key=differences.__getitem__)
    return {"max_abs_weight_difference": differences[worst], "where": worst}


def language(config: TrainConfig) -> dict[str, object]:
    need_gpus(1)
    return language_on("cuda")


def language_on(kind: str) -> dict[str, object]:
    """Returns the results of short trainings of a language model on a kind of device, compared with the CPU's."""
    start = fine_tuned()
    runs = {
        "cpu": trained("cpu", start),
        kind: trained(kind, start),
        "sharded": trained(kind, start, SHARDED),
        "adapters": trained(kind, start, ADAPTERS),
    }
    if kind != "cpu":  # hours there
        with tempfile.TemporaryDirectory() as folder:
            runs["large"] = trained(kind, random_model(Path(folder), LARGE), LARGE)
    weights = {name: cast("dict[str, Tensor]", run.pop("weights")) for name, run in runs.items()}
    differences = {f"cpu against {kind}": compared(weights["cpu"], weights[kind])}
    differences["sharded against not"] = compared(weights[kind], weights["sharded"])
    return {**runs, **differences}


def plans(words: Sequence[str]) -> dict[str, object]:
    """Returns seconds of an iteration, predicted from a profile of these devices and measured, by plan."""
    found, _ = run_case(words, 1, least_devices=1)
    return {
        name: {"predicted_s": plan.predicted_s, "measured_s": plan.measured_s.median, "error": plan.error}
        for name, plan in found.items()
    }


def on_gpu(run: Callable[..., dict[str, object]], *given: object) -> dict[str, object]:
    """Returns what work gives that needs one GPU at least."""
    need_gpus(1)
    return run(*given)


CHECKS = {
    "agrees": agrees,
    "physics": physics,
    "reduce": reduce,
    "same": same,
    "language": language,
    "rollout": lambda config: on_gpu(rollouts, published(), "cuda:0"),
    "lora": lambda config: on_gpu(training, published(), "cuda:0"),
    "plans": lambda config: on_gpu(plans, [*PPO, "cluster.torch_device=cuda"]),
}


def measure(run: Run[Options]) -> Report:
    """Runs the checks; one that is broken does not hide the others."""
    checks = chosen(run.options.only, CHECKS, "only")
    config = compose_train(["plan=collocated", *run.overrides])
    results: dict[str, object] = {}
    failed = False
    for name, check in checks.items():
        try:
            results[name] = check(config)
        except SkippedError as reason:
            results[name] = {"skipped": str(reason)}
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            traceback.print_exc()
            results[name], failed = {"failed": f"{type(error).__name__}: {error}"}, True
        print(f"{name}: {results[name]}", flush=True)
    return Report(content={"results": results}, exit_code=int(failed))


BENCHMARK = Benchmark("gpu", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
