"""A training without anything to start from is refused before anything heavy is imported, with all ways out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import tiny, train

from envs.maniskill import EXPERT_TASKS, why_no_expert
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import ClusterConfig, EnvConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.starting_point import on_cores, require_start
from rlinf_embodied.errors import ConfigError

PEG = ["env=maniskill", "env.task=PegInsertionSide-v1"]
REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_table_is_that_of_the_experts() -> None:
    from envs.tasks import EXPERTS

    assert set(EXPERT_TASKS) == set(EXPERTS)
    assert [why_no_expert(EnvConfig(task=task)) for task in EXPERT_TASKS] == [None] * len(EXPERT_TASKS)


def test_without_an_expert_all_ways_to_start_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        require_start(compose_train(PEG))
    parts = [
        "env.task is 'PegInsertionSide-v1', but scripted experts are for PickCube-v1",
        "warm_start.demonstrations=<file.h5",
        "warm_start.checkpoint=<dir>",
        "docs/warm_start.md",
    ]
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("given", ["warm_start.checkpoint=x", "warm_start.from_scratch=true", "env.task=StackCube-v1"])
def test_any_of_them_is_enough(given: str) -> None:
    key = given.partition("=")[0]
    require_start(compose_train([*(text for text in PEG if not text.startswith(f"{key}=")), given]))


def test_a_run_that_continues_needs_no_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        require_start(compose_train([*PEG, f"run.dir={tmp_path}"]))
    (tmp_path / "checkpoints").mkdir()
    require_start(compose_train([*PEG, f"run.dir={tmp_path}"]))


def test_a_dry_run_says_so_too_and_starts_nothing() -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['train_vla.py', *{PEG!r}, 'run.dry=true']\n"
        "try:\n    runpy.run_path('experiments/train_vla.py', run_name='__main__')\n"
        "finally:\n    assert not {'mani_skill', 'ray'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: env.task is 'PegInsertionSide-v1'")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("env._target_=my_env.make_env", r"env\._target_ is 'my_env.make_env', but my_env cannot be imported"),
        ("env._target_=envs.maniskill.why_no_expert", r"is called with \(config, num_envs, device, render_final\)"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named_before_anything_starts(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EmbodiedJob(tiny(given)).require_checkpoint(None)


def test_a_run_of_no_iterations_leaves_a_starting_folder(tmp_path: Path) -> None:
    policy = ["policy=state", "algorithm=ppo_dense", "env.chunk=4", "env.block_size=4"]
    start = ["warm_start.from_scratch=true", "run.num_iterations=0", "eval.num_episodes=2", *policy]
    train(tiny(f"run.dir={tmp_path / 'start'}", *start))
    folder = tmp_path / "start/checkpoints/latest"
    assert folder.resolve().name == "step_000000"
    again = ["run.num_iterations=1", f"warm_start.checkpoint={folder}", "eval.num_episodes=2", *policy]
    config = tiny(f"run.dir={tmp_path / 'run'}", *again, "warm_start.from_scratch=false")
    assert train(config)["iterations"] == 1


def test_simulators_on_cores_next_to_accelerators_leave_these_alone() -> None:
    cores = ClusterConfig(cpu_devices=2)
    pick, point = compose_train(["env=maniskill_pick"]).env, tiny().env
    assert on_cores(pick, cores).options == pick.options | {"backend": "cpu"}
    stock = replace(pick, options={"backend": "stock"})
    assert (on_cores(stock, cores), on_cores(point, cores), on_cores(pick, ClusterConfig())) == (stock, point, pick)
