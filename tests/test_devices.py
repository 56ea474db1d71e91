"""A training on a GPU gives what it gives on a CPU; equal devices give equal bits, which needs no GPU to be tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from experiments.bench.harness.trainings import in_this_process, iterations, job_of, starting_folder, weights_of
from policies.tiny_vla import TinyVLA
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied import workflow as embodied
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.reasoning import workflow as reasoning
from rlinf_embodied.targets import load_target

TOY = (  # its physics is that of the CPU on every device
    "env=point_reach",
    "plan=collocated",
    "env.num_envs=32",
    "policy.hidden_size=32",
    "policy.num_layers=1",
    "policy.num_heads=2",
    "policy.stem_width=16",
    "policy.keypoints=4",
    "algorithm.critic_warmup_iterations=0",
    "algorithm.target_kl=null",
)
SUMS = (  # that 200 steps of fine-tuning make solvable now and then
    "data.level=sum1-2-9",
    "plan=collocated",
    "warm_start.steps=200",
    "warm_start.num_examples=2048",
    "generation.max_new_tokens=24",
    "policy.context_length=48",
)
SHARDED = ("algorithm.sharding=fsdp2", "run.exact=false")
ADAPTERS = ("policy.precision=bfloat16", "policy.lora.rank=8", "run.exact=false")
Weights = Mapping[str, Tensor]


def example(config: TrainConfig, rows: int) -> tuple[TinyVLA, Observation, Tensor]:
    """Returns a policy and random inputs of an env like PickCube's, on the CPU."""
    env = config.env
    spec = EnvSpec(env.task, rows, env.chunk, env.horizon, 7, 19, 44, env.obs_size, tuple(env.cameras), "none")
    draw = torch.Generator().manual_seed(0)
    shape = (rows, len(env.cameras), env.obs_size, env.obs_size, 3)
    images = torch.randint(0, 255, shape, dtype=torch.uint8, generator=draw)
    observation = Observation(torch.randn(rows, 19, generator=draw), ("pick up the cube",) * rows, images)
    tokens = torch.randint(0, config.policy.num_bins, (rows, env.chunk, 7), generator=draw)
    return TinyVLA(config.policy, spec, seed=0), observation, tokens


def trained_toy(kind: str, folder: Path) -> tuple[Weights, float]:
    """Returns (weights on the CPU, largest log-ratio at the start) after two iterations of PPO on a kind of device."""
    config = compose_train(TOY)
    policy = load_target(config.policy._target_)(config.policy, make_env(config.env, 1, "cpu").spec, 0)
    save_policy(cast(Policy, policy), folder, config.env, config.policy)
    with in_this_process(embodied.training_workflow(config, str(folder)), config.plan.trees, kind) as executor:
        ratios = [metrics["losses/initial_log_ratio"] for _, metrics in iterations(job_of(config), executor, 2)]
        return weights_of(executor), max(ratios)


def trained_language(kind: str, folder: str, *overrides: str) -> tuple[Weights, float]:
    """Trains for three iterations of GRPO.

    Returns:
        the weights on the CPU, and the largest difference of log-probs between generation and training.
    """
    config = compose_math([*SUMS, f"policy.folder={folder}", *overrides])
    with in_this_process(reasoning.training_workflow(config, folder), config.plan.trees, kind) as executor:
        mismatches = [metrics["losses/mismatch_max"] for _, metrics in iterations(job_of(config), executor, 3)]
        return weights_of(executor), max(mismatches)


def fine_tuned() -> str:
    """Returns the folder of a small language model that a CPU fine-tuned, or found in the cache."""
    return starting_folder(compose_math(SUMS), in_process=True)


def difference(here: Weights, there: Weights) -> float:
    """Returns the largest difference of any weight."""
    assert here.keys() == there.keys()
    return max(float((here[name] - there[name]).abs().max()) for name in here if here[name].numel())


def check_language(kind: str, limit: float, sharded_limit: float) -> None:
    """Trains on a kind of device, beside the CPU, FSDP2 on one process, and adapters on bfloat16 weights."""
    start = fine_tuned()
    (cpu, cpu_mismatch), (here, mismatch) = trained_language("cpu", start), trained_language(kind, start)
    assert difference(cpu, here) <= limit
    assert max(cpu_mismatch, mismatch) < 1e-4
    assert difference(here, trained_language(kind, start, *SHARDED)[0]) < sharded_limit
    _, rounded = trained_language(kind, start, *ADAPTERS)
    assert 1e-4 < rounded < 0.5


# -------------------------------------------------------------------------------------------------------- equal devices
def test_the_toy_training_gives_equal_weights_on_equal_devices(tmp_path):
    (first, ratio), (second, _) = trained_toy("cpu", tmp_path / "a"), trained_toy("cpu", tmp_path / "b")
    assert difference(first, second) == 0.0
    assert ratio <= 1e-5
    name = next(name for name, tensor in first.items() if tensor.numel())
    assert difference(first, {**second, name: second[name] + 0.5}) == pytest.approx(0.5, abs=1e-6)


def test_short_trainings_of_a_language_model_agree_on_equal_devices():
    check_language("cpu", limit=0.0, sharded_limit=1e-4)


# ------------------------------------------------------------------------------------------------------------------ GPU
@pytest.mark.gpu
def test_the_toy_training_gives_nearly_the_weights_of_the_cpu(tmp_path):
    (here, here_ratio), (there, there_ratio) = (trained_toy(kind, tmp_path / kind) for kind in ("cpu", "cuda"))
    assert difference(here, there) < 1e-2
    assert here_ratio <= 1e-5
    assert there_ratio < 1e-2


@pytest.mark.gpu
def test_a_language_model_is_trained_nearly_as_on_the_cpu():
    check_language("cuda", limit=1e-2, sharded_limit=1e-3)


@pytest.mark.gpu
def test_log_probs_of_the_same_tokens_agree_with_those_of_the_cpu():
    config = compose_train(["plan=collocated"])
    vla, observation, tokens = example(config, 64)
    here, _ = vla.evaluate(vla.encode(observation), tokens, config.policy.temperature)
    vla.module.cuda()
    moved = {name: getattr(observation, name).cuda() for name in ("proprio", "images")}
    shown = dataclasses.replace(observation, **moved)
    there, _ = vla.evaluate(vla.encode(shown), tokens.cuda(), config.policy.temperature)
    assert float((here - there.cpu()).abs().max()) < 1e-2


@pytest.mark.gpu
def test_two_iterations_on_pick_cube_begin_with_a_ratio_of_one(tmp_path):
    config = compose_train(["plan=collocated"])
    vla, _, _ = example(config, config.env.block_size)
    save_policy(cast(Policy, vla), tmp_path, config.env, config.policy)
    with in_this_process(embodied.training_workflow(config, str(tmp_path)), config.plan.trees, "cuda") as executor:
        ratios = [metrics["losses/initial_log_ratio"] for _, metrics in iterations(job_of(config), executor, 2)]
    assert max(ratios) < 1e-2
