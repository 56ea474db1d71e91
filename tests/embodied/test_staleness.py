"""Rollouts that run ahead of the update: nothing is lost where a run stops or is disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import metric_rows, tiny, train
from training_faults import lost, once

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.errors import ConfigError

CARRIED = ["env.carry_over=true", "algorithm.tis_cap=2.0"]
SHORT = [
    *("run.num_iterations=4", "checkpoint.every=1", "env.num_envs=8", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *(
        "eval.num_episodes=2",
        "eval.num_envs=2",
        "warm_start.from_scratch=true",
        "plan.max_staleness=2",
        "algorithm.lr_end_fraction=1.0",
    ),
]


def short(folder: Path, *overrides: str) -> TrainConfig:
    return tiny(f"run.dir={folder}", *SHORT, *CARRIED, *overrides)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(short(folder, "plan=collocated"))


@pytest.mark.parametrize("stopped", [1, 3])
def test_a_stopped_run_continues_under_another_plan_to_the_same_weights(tmp_path, straight, stopped: int) -> None:
    folder, summary = straight
    train(short(tmp_path, "plan=collocated", f"run.num_iterations={stopped}"))
    found = train(short(tmp_path, "plan=disaggregated", "cluster.num_devices=3"))
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)


@pytest.mark.parametrize(
    ("plan", "kind", "method", "call"),
    [("collocated", PolicyLearner, "run", 2), ("disaggregated", EnvStage, "step", 11)],
    ids=["an update", "a rollout"],
)
def test_what_a_fault_takes_is_run_again(tmp_path, monkeypatch, straight, plan, kind, method, call) -> None:
    folder, summary = straight
    calls = once(monkeypatch, kind, method, call, lost(), True)
    found = train(short(tmp_path, f"plan={plan}", f"cluster.num_devices={3 if plan == 'disaggregated' else 1}"))
    assert len(calls) > call + 1
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)


def test_without_a_correction_it_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tis_cap is None, but with a staleness of 1.*tis_cap=2\.0"):
        train(tiny(f"run.dir={tmp_path}/run", "plan=collocated", "plan.max_staleness=1"))
    assert list(tmp_path.iterdir()) == []
