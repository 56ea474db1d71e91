"""A driver that is killed at any moment loses time only: the run goes on, under another plan too, to the same bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from runs import clone, four, metric_rows, tiny_overrides, train
from stopped_runs import straight_runs

from rlinf_embodied.learning import checkpoint


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    return straight_runs(tmp_path_factory, lambda folder, _: train(four(folder)), "ppo")()


def digest(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


@pytest.mark.slow
@pytest.mark.ray
def test_a_driver_with_ray_workers_that_is_killed_takes_them_along_and_its_run_goes_on(straight, tmp_path) -> None:
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
    assert digest(tmp_path) == digest(straight)
    assert metric_rows(tmp_path) == metric_rows(straight)
