"""Completions of earlier weights: nothing is lost, and what is not trained any more is not computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from math_runs import DAPO, TWO_STEPS, tiny_math
from runs import executor_for, iterate, metric_rows, train

from rlinf_embodied.config import MathConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning import generation_stage
from rlinf_embodied.runtime.session import SerialSession

CORRECTED = ["algorithm.tis_cap=2.0", "algorithm.lr_end_fraction=1.0", "run.num_iterations=4"]


def test_log_probs_of_weights_that_are_not_trained_any_more_are_not_computed(monkeypatch) -> None:
    read, all_log_probs = [], generation_stage.all_log_probs
    monkeypatch.setattr(generation_stage, "all_log_probs", lambda *asked: read.append(asked) or all_log_probs(*asked))
    config = tiny_math(*TWO_STEPS, *CORRECTED)
    trees = [{**entry, "staleness": 1} for entry in config.plan.variants]
    metrics = iterate(config, executor_for(config, trees, 1, SerialSession()), 4)
    assert [row["rollout/staleness"] for row in metrics] == [0.0, 1.0, 1.0, 1.0]
    assert len(read) == config.num_blocks  # of the first iteration alone


def short(folder: Path, *overrides: str) -> MathConfig:
    few = ["checkpoint.every=1", "eval.num_problems=8", "eval.num_samples=0", *CORRECTED]
    config = tiny_math(*few, *DAPO, "plan.max_staleness=2", *overrides)
    config.run.dir = str(folder)
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(short(folder))


def test_a_stopped_run_continues_under_another_plan_to_the_same_weights(tmp_path, straight) -> None:
    folder, summary = straight
    train(short(tmp_path, "run.num_iterations=2"))
    found = train(short(tmp_path, "plan=disaggregated", "cluster.num_devices=2"))
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)


def test_without_a_correction_it_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tis_cap is None, but with a staleness of 1.*tis_cap=2\.0"):
        train(tiny_math("plan.max_staleness=1", "algorithm.tis_cap=null", f"run.dir={tmp_path}/run"))
    assert list(tmp_path.iterdir()) == []
