"""From a LeRobot dataset in degrees to a policy that lerobot loads: fine-tuning, RL, evaluation, the same actions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openvla_folders
import pytest
from conftest import REPOSITORY
from runs import SFT, tiny_overrides, train

from envs.foreign.adapter import folder_of
from experiments.examples.compare_lerobot import Options, compare
from rlinf_embodied.compose import compose_evaluate, compose_export, compose_train
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.sources import sources_of, statistics_of

ORACLES = REPOSITORY / "tests/oracles/lerobot"
ENV = [f"env={REPOSITORY}/tests/degrees_arm.yaml", "env.block_size=4"]
RUN = [
    *("policy=smolvla", "policy.options.clip_actions=false", "policy.options.critic_hidden_size=8"),
    *("env.chunk=10", "env.execute_steps=5", "env.horizon=20", "env.num_envs=4"),
    *("eval.num_episodes=2", "eval.num_envs=2", "warm_start.num_demos=-"),
]
CLIPS = "policy.options.clip_actions=true"
CLONE = [*SFT, "algorithm.head_epochs=0", "run.num_iterations=1", "algorithm.batch_size=8"]
RL = ["algorithm=ppo_finetune", "algorithm.critic_warmup_iterations=0", "algorithm.ratio_tolerance=1e-3"]


def recorded(kind: str, place: Path) -> tuple[str, str]:
    """Returns folders of data in degrees, and their instruction."""
    if kind == "lerobot":  # two episodes each
        return ",".join(str(ORACLES / "datasets" / name) for name in ("images", "video")), "Pick up the red cube"
    own = ["policy=expert", "num_episodes=6", f"out={place}"]
    export_dataset(compose_export([*ENV, *own]), lambda *progress: None)
    return str(place), "reach the ball"


@pytest.mark.ray  # in a process that has not rendered with MuJoCo in another way
@pytest.mark.parametrize("kind", ["lerobot", pytest.param("mujoco", marks=pytest.mark.slow)])
def test_a_dataset_in_degrees_becomes_a_policy_that_lerobot_loads(tmp_path: Path, kind: str) -> None:
    base, clone, rl = tmp_path / "base", tmp_path / "sft", tmp_path / "rl"
    shutil.copytree(ORACLES / "smolvla/checkpoint", base, ignore=shutil.ignore_patterns("policy_*"))
    shutil.copytree(ORACLES / "smolvla/backbone", base / "backbone")
    data, task = recorded(kind, tmp_path / "data")

    def run(start: Path, out: Path, *words: str) -> dict:
        own = [f"env.instruction={task}", f"warm_start.checkpoint={start}", f"run.dir={out}"]
        return train(compose_train(tiny_overrides(*ENV, *RUN, *own, *words)))

    run(base, clone, *CLONE, f"data={data}")
    found = run(clone / "checkpoints/latest", rl, *RL, "run.num_iterations=1")
    checkpoint = rl / "checkpoints/latest"
    again = ["eval.num_episodes=2", "eval.num_envs=2", "cluster=serial", "run.seed=3", "eval.record_video=false"]
    again += [f"checkpoint={checkpoint}", f"run.dir={tmp_path}/evaluation"]
    assert evaluate_command(compose_evaluate(again))["success_once"] == found["after"]["success_once"]
    if not folder_of("lerobot").exists():
        pytest.skip("python -m experiments.setup.foreign env=lerobot has not been run")
    assert compare(Options(checkpoint=str(checkpoint), data=data.split(",")[0])) == 0


@pytest.mark.ray
def test_openvla_oft_is_fine_tuned_as_published_in_the_degrees_of_a_dataset(tmp_path: Path) -> None:
    data, task = recorded("lerobot", tmp_path)
    base = openvla_folders.write_published(tmp_path / "base", action=6, proprio=6)
    own = ["policy=openvla_oft", "policy.options.head=l1", "policy.options.proprio=true", "policy.options.lora.rank=2"]
    own += ["policy.options.new_parts=true", f"env.instruction={task}", f"data={data}"]
    own += [f"warm_start.checkpoint={base}", f"run.dir={tmp_path}/sft"]
    config, clipped = (compose_train(tiny_overrides(*ENV, *RUN, *CLONE, *own, *words)) for words in ([], [CLIPS]))
    assert [[source.bounded for source in sources_of(made)] for made in (config, clipped)] == [[False] * 2, [True] * 2]
    train(config)
    written = json.loads((tmp_path / "sft/checkpoints/latest/dataset_statistics.json").read_text())
    assert list(written) == [config.env.task]
    assert (tmp_path / "sft/checkpoints/latest/action_head--0_checkpoint.pt").exists()
    measured = statistics_of(sources_of(config))
    assert measured["action"]["q99"].max() > 10
    for section, name in (("action", "action"), ("proprio", "observation.state")):
        for kind in ("q01", "q99"):
            assert written[config.env.task][section][kind] == measured[name][kind].tolist()
