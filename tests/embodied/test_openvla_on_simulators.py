"""The documented way of a small OpenVLA folder on ManiSkill: evaluated, trained by PPO and by GRPO, and restored."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import train

from experiments.examples.small_openvla import Options, write_small
from policies.openvla.policy import OpenVLAPolicy
from rlinf_embodied.compose import compose_train
from rlinf_embodied.learning.checkpoint import weights_sha256

SMALL = [
    *("cluster=serial", "plan=collocated", "env.num_envs=8", "env.block_size=8", "env.obs_size=56"),
    *("eval.num_episodes=2", "eval.num_envs=2", "eval.record_video=false", "env.horizon=10"),
    *("policy.options.lora.rank=4", "policy.options.prompt_length=24", "algorithm.ratio_tolerance=1e-3"),
    *("run.num_iterations=2", "run.until_success=null", "algorithm.epochs=1", "algorithm.num_minibatches=2"),
]
PPO = ["algorithm=ppo_finetune", "env.chunks_per_rollout=2", "algorithm.critic_warmup_iterations=0"]
GRPO = ["algorithm=grpo", "algorithm.max_resamples=0", "algorithm.min_groups=1"]
ONE_BY_ONE = ["policy=openvla", "env.chunk=1", "env.cameras=[base_camera]", "env.horizon=4", "env.chunks_per_rollout=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_small(Options(out=str(tmp_path_factory.mktemp("small") / "openvla"), hidden_size=32))


@pytest.mark.sim
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["policy=openvla_oft", *PPO], marks=pytest.mark.slow, id="oft ppo"),
        pytest.param(["policy=openvla_oft", *GRPO], marks=pytest.mark.slow, id="oft grpo"),
        pytest.param([*PPO, *ONE_BY_ONE], id="openvla ppo"),
    ],
)
def test_a_small_folder_is_evaluated_trained_and_restored(folder, tmp_path, chosen: list[str]) -> None:
    start = [f"warm_start.checkpoint={folder}", f"run.dir={tmp_path}", "env=maniskill_pick"]
    given = dict(text.split("=", 1) for text in [*SMALL, *chosen, *start])
    summary = train(compose_train([f"{key}={value}" for key, value in given.items()]))
    assert summary["iterations"] == 2
    assert summary["num_eval_episodes"] == 2
    again = OpenVLAPolicy.from_folder(tmp_path / "checkpoints/latest")
    assert weights_sha256(again.module.state_dict()) == summary["weights_sha256"]
