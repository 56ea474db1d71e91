"""Trainings on a CUDA device: weights close to those of the CPU, resume, precision, and toy folders of published VLAs.

On a GPU sums have another order than on a CPU, so results are compared with a tolerance.  Each comparison is printed
(`pytest -m gpu -rP`).
"""

from __future__ import annotations

import json
from pathlib import Path

import openvla_folders
import pytest
import torch
from math_runs import DAPO, PPO, TWO_STEPS, tiny_math
from runs import GRPO, clone, exported_weights, iterate, metric_rows, tiny, tiny_overrides, train

from experiments.bench.gpu.__main__ import compared
from experiments.bench.harness.trainings import in_this_process, job_of
from experiments.examples.small_pi import Options, write_small
from policies.pi.policy import PiPolicy
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import MathConfig, PolicyConfig, TrainConfig
from tests.observations import env_spec, observed

pytestmark = pytest.mark.gpu

KIND = "cuda"
ON_GPU = [f"cluster.torch_device={KIND}"]
CLOSE = 1e-2  # largest difference of a weight after two iterations; lr is 1e-3, and Adam's steps are up to that
EMBODIED = {
    "ppo": [],
    "grpo": GRPO,
    "critic from images": ["policy.critic=observation", "algorithm.bootstrap_at_timeout=true"],
    "carried over": ["env.carry_over=true", "policy.options.freeze_stem=false"],
    "flow": ["policy=flow_vla", "policy.temperature=0.5", "policy.options.expert_size=32"],
    "sharded": ["algorithm.sharding=fsdp2", "run.exact=false"],
}
LANGUAGE = {
    "two steps and a reference": [*TWO_STEPS, "algorithm.kl_coef=0.1"],
    "ppo": [*PPO, "algorithm.critic_warmup_iterations=0"],
    "dapo": DAPO,
    "sharded": ["algorithm.sharding=fsdp2", "run.exact=false"],
    "adapters": ["policy.lora.rank=4"],
}
SMALL_PI = {"action_dim": 2, "proprio_dim": 4, "chunk": 4, "hidden_size": 16}


def trained(config: TrainConfig | MathConfig, kind: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Returns the weights and metrics of two iterations that start from one policy, made on the CPU."""
    workflow = job_of(config).workflow(str(clone(config)))
    with in_this_process(workflow, config.plan.variants, kind) as executor:
        metrics = iterate(config, executor, 2)
        return exported_weights(executor), metrics


def require_close(config: TrainConfig | MathConfig) -> list[dict[str, float]]:
    """Checks that two iterations on the GPU give about the weights of the CPU, and that these have moved."""
    (here, _), (there, metrics) = trained(config, "cpu"), trained(config, KIND)
    difference = compared(here, there)
    print(difference)
    assert difference["max_abs_weight_difference"] < CLOSE
    return metrics


@pytest.mark.parametrize("variant", EMBODIED)
def test_two_iterations_give_about_the_weights_of_the_cpu(variant: str) -> None:
    metrics = require_close(tiny("plan=collocated", *EMBODIED[variant]))
    assert metrics[-1]["losses/policy_steps"] > 0
    assert metrics[0]["losses/initial_log_ratio"] < 1e-3


@pytest.mark.parametrize("variant", LANGUAGE)
def test_a_language_model_gets_about_the_weights_of_the_cpu(variant: str) -> None:
    metrics = require_close(tiny_math(*LANGUAGE[variant]))
    assert metrics[-1]["charts/optimizer_steps"] > 0
    assert metrics[0]["losses/mismatch_max"] < 1e-3


def test_passes_in_bfloat16_are_close_to_those_in_float32() -> None:
    norms = []
    for precision in ("float32", "bfloat16"):
        settings = [f"algorithm.precision={precision}", "algorithm.critic_warmup_iterations=0"]
        _, metrics = trained(tiny("plan=collocated", *settings), KIND)
        print(precision, metrics[0]["losses/initial_log_ratio"], metrics[0]["losses/grad_norm"])
        assert metrics[0]["losses/initial_log_ratio"] < 0.1
        norms.append(metrics[0]["losses/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.2)


def test_a_run_continues_on_the_gpu_and_on_the_cpu(tmp_path: Path) -> None:
    short = ["run.num_iterations=2", "checkpoint.every=2", "eval.num_episodes=3", "eval.num_envs=3"]
    assert train(tiny(f"run.dir={tmp_path}", *ON_GPU, *short))["iterations"] == 2
    assert json.loads((tmp_path / "manifest.json").read_text())["hardware"]["kind"] == KIND
    assert train(tiny(f"run.dir={tmp_path}", *ON_GPU, *short, "run.num_iterations=3"))["iterations"] == 3
    assert train(tiny(f"run.dir={tmp_path}", *short, "run.num_iterations=4"))["iterations"] == 4
    assert len(metric_rows(tmp_path)) == 4


@torch.no_grad()
@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla"])
def test_a_flow_vla_acts_as_on_the_cpu(tmp_path: Path, family: str) -> None:
    folder = write_small(Options(family=family, out=str(tmp_path / family), **SMALL_PI))
    env = env_spec("PointReach-v0", 3, 4, 12, 2, 4, 9, 16, ("base_camera",))
    config = PolicyConfig(_target_="policies.pi.policy.PiPolicy", name="pi")
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 1, 20, 28, 3), generator=draw, dtype=torch.uint8)
    proprio, state = torch.rand(3, 4, generator=draw) * 2 - 1, torch.randn(3, 9, generator=draw)
    actions = []
    for place in ("cpu", KIND):
        policy = PiPolicy.from_folder(folder, env, config)
        policy.module.to(place)
        assert policy.spec.greedy_noise is not None
        noise = policy.spec.greedy_noise.draw(0, "evaluate", range(3)).to(place)
        seen = observed(proprio.to(place), ("pick up the cube", "move", "go"), images.to(place), state.to(place))
        actions.append(policy.act(policy.encode(seen), noise, 0.0).actions.cpu())
    print(float((actions[0] - actions[1]).abs().max()))
    torch.testing.assert_close(actions[1], actions[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla", "openvla_oft"])
def test_a_published_folder_is_trained(tmp_path: Path, family: str) -> None:
    if family == "openvla_oft":
        folder = openvla_folders.write_published(tmp_path / "published", action=2)
        options = ["policy.options.prompt_length=24", "policy.options.lora.rank=4"]
        own = {text for text in tiny_overrides() if text.startswith(("policy.", "warm_start."))}
    else:
        folder = write_small(Options(family=family, out=str(tmp_path / "published"), **SMALL_PI))
        options, own = ["policy.options.critic_hidden_size=8"], set()
    run = [f"policy={family}", *options, f"warm_start.checkpoint={folder}", f"run.dir={tmp_path / 'run'}", *ON_GPU]
    run += ["run.num_iterations=2", "algorithm.critic_warmup_iterations=0", "algorithm.ratio_tolerance=1e-2"]
    small = [text for text in tiny_overrides(*run) if text not in own]
    assert train(compose_train(small))["iterations"] == 2
    ratios = [row["losses/initial_log_ratio"] for row in metric_rows(tmp_path / "run")]
    print(ratios)
    assert max(ratios) < 1e-2
