"""A run resumes from its newest whole checkpoint and says so, stays the run that it is, and has its folder alone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from runs import clone, four, metric_rows, tiny_overrides, train, trainer_of, weights_of
from stopped_runs import straight_runs

from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.learning import checkpoint


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    return straight_runs(tmp_path_factory, lambda folder, _: train(four(folder)), "ppo")()


@pytest.fixture
def copied(straight, tmp_path) -> Path:
    """The same at another place."""
    return shutil.copytree(straight, tmp_path / "moved", symlinks=True)


def break_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------------------- the same run
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["run.seed=7", "algorithm.lr=1e-5"],
            "run.seed is 7 here and 3 there; algorithm.lr is 1e-05 here and 0.001 there",
        ),
        (["env.options.gap=0.5"], "env.options.gap is 0.5 here and 'not given' there"),
        (["plan.max_staleness=1"], "plan.max_staleness is 1 here and 0 there"),
        (["warm_start.checkpoint=x"], "warm_start.checkpoint is 'x' here and None there"),
        (["env=maniskill_pick"], "env.task is 'PickCube-v1' here and 'PointReach-v0' there"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_run_is_cannot_change_on_the_way(straight, nothing_starts, overrides, says) -> None:
    before = (straight / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        trainer_of(four(straight, *overrides))
    named = ["another run.dir", f"warm_start.checkpoint={straight / 'checkpoints/step_000004'}"]
    assert [part for part in (says, *named) if part not in str(caught.value)] == [], str(caught.value)
    assert (straight / "config.yaml").read_bytes() == before
    with pytest.raises(ConfigError):
        trainer_of(four(straight.parent / "new", f"resume={straight / 'checkpoints/latest'}", *overrides))
    assert not (straight.parent / "new").exists()


def test_how_long_where_and_what_is_looked_at_may_change(copied) -> None:
    changed = ["run.num_iterations=5", "plan=disaggregated", "cluster.num_devices=2", "checkpoint.keep=1"]
    changed += ["eval.every=1", "warm_start.cache_dir=elsewhere", "run.until_success=1.0", "eval.check_episodes=4"]
    assert train(four(copied, *changed))["iterations"] == 5


# -------------------------------------------------------------------------------------------------------- which one
def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_it_named(copied, nothing_starts) -> None:
    break_byte(copied / "checkpoints/step_000004/model.safetensors")
    for chosen in ([], [f"resume={copied / 'checkpoints/latest'}"]):
        with pytest.raises(CheckpointError, match=r"step_000004 is damaged \(the checksum of model.*use step_000002"):
            trainer_of(four(copied, *chosen))
    trainer = trainer_of(four(copied, f"resume={copied / 'checkpoints/step_000002'}"))
    assert "step_000002: iteration 2 of 4 is done" in trainer._note


def test_checkpoints_of_which_none_can_be_used_are_not_begun_over(copied, nothing_starts) -> None:
    for path in (copied / "checkpoints").glob("step_*"):
        (path / "manifest.json").unlink()
    before = sorted((copied / "checkpoints").rglob("*"))
    with pytest.raises(CheckpointError, match=r"step_000004 is incomplete \(manifest.json: No .* use another run.dir"):
        trainer_of(four(copied))
    assert sorted((copied / "checkpoints").rglob("*")) == before


# ------------------------------------------------------------------------------------------------------ a killed driver
@pytest.mark.slow
@pytest.mark.ray
def test_a_driver_with_ray_workers_that_is_killed_takes_them_along_and_its_run_continues(straight, tmp_path) -> None:
    start = f"warm_start.checkpoint={clone(four(tmp_path))}"
    shown = ["cluster=local", "cluster.num_devices=2", "plan=disaggregated", start]
    given = ["run.num_iterations=4", "checkpoint.every=2", "eval.num_episodes=3", "eval.num_envs=3"]
    words = tiny_overrides(f"run.dir={tmp_path}", *given, *shown)
    script = str(REPOSITORY / "experiments/train_vla.py")
    process = subprocess.Popen([sys.executable, "-u", script, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("iteration 3/4" in line for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)  # its workers have its output, too: they are gone when that ends
    assert checkpoint.find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step_000002"
    train(four(tmp_path, start, "cluster.num_devices=4"))
    assert weights_of(tmp_path) == weights_of(straight)
    assert metric_rows(tmp_path) == metric_rows(straight)
