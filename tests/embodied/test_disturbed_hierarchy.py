"""A run of two levels that loses a worker ends with the weights of an undisturbed one, those of both levels."""

from __future__ import annotations

from pathlib import Path

import pytest
from hierarchical_runs import two_levels
from runs import metric_rows, train
from safetensors.torch import load_file
from training_faults import lost, once

from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.embodied.rollout_stage import RolloutStage

SHORT = [
    *("run.num_iterations=3", "checkpoint.every=3", "eval.num_episodes=2", "eval.num_envs=2"),
    *("env.num_envs=8", "env.carry_over=true", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *("hierarchy.algorithm.epochs=1", "hierarchy.algorithm.value_epochs=1", "warm_start.from_nothing=true"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the summary of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(two_levels(f"run.dir={folder}", *SHORT))


def weights(folder: Path) -> dict[str, dict]:
    """Returns the tensors of both policies in a run's newest checkpoint, as lists."""
    newest = folder / "checkpoints" / "latest"
    found = {name: load_file(newest / name / "model.safetensors") for name in (".", "high")}
    return {name: {key: tensor.tolist() for key, tensor in tensors.items()} for name, tensors in found.items()}


@pytest.mark.parametrize(
    ("kind", "method", "call", "after"),
    [
        pytest.param(RolloutStage, "step", 11, False, id="the rollout", marks=pytest.mark.slow),
        pytest.param(PolicyLearner, "run", 3, False, id="the lower level's update"),
        pytest.param(PolicyLearner, "state_part", 0, True, id="the checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_whole_iteration_is_made_again(tmp_path, monkeypatch, straight, kind, method, call, after) -> None:
    folder, summary = straight
    calls = once(monkeypatch, kind, method, call, lost(), after)
    found = train(two_levels(f"run.dir={tmp_path}", *SHORT))
    assert len(calls) > call + 1
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert weights(tmp_path) == weights(folder)
    assert metric_rows(tmp_path) == metric_rows(folder)
