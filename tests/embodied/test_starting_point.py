"""A training without anything to start from is refused before anything heavy is imported, with all ways out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envs.expert_tasks import EXPERT_TASKS, why_no_expert
from rlinf_embodied.command_line import _compose_training
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.starting_point import require_start
from rlinf_embodied.errors import ConfigError

PEG = ["env=maniskill", "env.task=PegInsertionSide-v1"]
REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_table_is_that_of_the_experts() -> None:
    from envs.experts import EXPERTS

    assert set(EXPERT_TASKS) == set(EXPERTS)
    assert [why_no_expert(EnvConfig(task=task)) for task in EXPERT_TASKS] == [None] * len(EXPERT_TASKS)


def test_without_an_expert_all_ways_to_start_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        require_start(compose_train(PEG))
    parts = [
        "env.task is 'PegInsertionSide-v1', but scripted experts are for PickCube-v1",
        "warm_start.demonstrations=<file.h5>",
        "warm_start.demonstrations=<folder>",
        "env=maniskill env.task=PegInsertionSide-v1 policy=state algorithm=ppo_dense run.dir=runs/teacher",
        "env=maniskill env.task=PegInsertionSide-v1 warm_start.teacher=runs/teacher/checkpoints/latest",
        "warm_start.checkpoint=<dir>",
        "docs/warm_start.md",
    ]
    assert [part for part in parts if part not in str(caught.value)] == []
    with pytest.raises(ConfigError, match=r"(?s)env.control_mode is 'pd_joint_delta_pos'.* env.control_mode=pd_jo"):
        require_start(compose_train(["env=maniskill_pick", "env.control_mode=pd_joint_delta_pos"]))
    with pytest.raises(ConfigError, match="did you mean PickCube-v1"):
        require_start(compose_train(["env=maniskill", "env.task=PickCubee-v1"]))


@pytest.mark.parametrize(
    "given",
    [
        "warm_start.checkpoint=x",
        "warm_start.demonstrations=x",
        "warm_start.teacher=x",
        "warm_start.from_nothing=true",
        "policy=state",
        "env=point_reach",
        "env.task=StackCube-v1",
    ],
)
def test_any_of_them_is_enough(given: str) -> None:
    key = given.partition("=")[0]
    require_start(compose_train([*(text for text in PEG if not text.startswith(f"{key}=")), given]))


def test_a_run_that_goes_on_needs_no_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        _compose_training([*PEG, f"run.dir={tmp_path}"])
    (tmp_path / "checkpoints").mkdir()
    assert _compose_training([*PEG, f"run.dir={tmp_path}"]).run.dir == str(tmp_path)
    with pytest.raises(ConfigError):
        _compose_training([*PEG, f"run.dir={tmp_path}", "resume=never"])


def test_a_dry_run_says_so_too_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rlinf_embodied.command_line import train_main\n"
        f"sys.argv = ['train_vla.py', *{PEG!r}, 'run.dry=true']\n"
        "try:\n    train_main(lambda config: 0)\n"
        "finally:\n    assert not {'torch', 'mani_skill', 'ray'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: env.task is 'PegInsertionSide-v1'")


def test_training_starts_from_one_policy() -> None:
    with pytest.raises(ConfigError, match=r"warm_start.checkpoint is 'a', but warm_start.teacher is 'b'.* one of"):
        compose_train(["warm_start.checkpoint=a", "warm_start.teacher=b"])
