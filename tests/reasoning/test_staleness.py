"""Completions of earlier weights: no plan changes which, nothing is lost, and the ratio's clip is around the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
from math_runs import DAPO, PPO, TWO_STEPS, iterate_math, math_executor, tiny_math, train_math, untimed_rows
from runs import digest

from rlinf_embodied.config import MathConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning import generation_stage
from rlinf_embodied.runtime.session import SerialSession

CORRECTED = ["algorithm.tis_cap=2.0", "algorithm.lr_end_fraction=1.0", "run.num_iterations=4"]
VARIANTS = {"dapo, several steps": [*DAPO, *TWO_STEPS], "grpo, several steps": TWO_STEPS, "ppo": PPO}
Trained = tuple[str, list[dict[str, float]]]


def trained(variant: str, plan: str, devices: int, staleness: int) -> Trained:
    config = tiny_math(*VARIANTS[variant], *CORRECTED, f"plan={plan}")
    trees = [{**entry, "staleness": staleness} for entry in config.plan.variants]
    executor = math_executor(config, trees, devices, SerialSession())
    metrics = iterate_math(config, executor, 4)
    return digest(executor), metrics


@pytest.mark.parametrize(
    ("variant", "plan", "devices", "staleness"),
    [("dapo, several steps", "hybrid", 2, 1), ("ppo", "disaggregated", 4, 2)],
)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(variant, plan, devices, staleness) -> None:
    expected, metrics = trained(variant, "collocated", 1, staleness)
    assert [row["rollout/staleness"] for row in metrics] == [float(min(n, staleness)) for n in range(4)]
    assert metrics[-1]["losses/mismatch_max"] > 1e-3  # other weights sampled than were trained
    assert metrics[-1]["losses/initial_log_ratio"] < 1e-4  # the clip is around the weights that were trained
    found, found_metrics = trained(variant, plan, devices, staleness)
    assert found_metrics == metrics
    assert found == expected


def test_log_probs_of_weights_that_are_not_trained_any_more_are_not_computed(monkeypatch) -> None:
    read, all_log_probs = [], generation_stage.all_log_probs
    monkeypatch.setattr(generation_stage, "all_log_probs", lambda *asked: read.append(asked) or all_log_probs(*asked))
    _, metrics = trained("grpo, several steps", "collocated", 1, 1)
    assert [row["rollout/staleness"] for row in metrics] == [0.0, 1.0, 1.0, 1.0]
    assert len(read) == tiny_math(*TWO_STEPS).num_blocks  # of the first iteration alone


def short(folder: Path, *overrides: str) -> MathConfig:
    few = ["checkpoint.every=1", "eval.num_problems=8", "eval.num_samples=0", *CORRECTED]
    config = tiny_math(*few, *DAPO, "plan.max_staleness=2", *overrides)
    config.run.dir = str(folder)
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train_math(short(folder))


def test_a_stopped_run_continues_under_another_plan_to_the_same_weights(tmp_path, straight) -> None:
    folder, summary = straight
    train_math(short(tmp_path, "run.num_iterations=2"))
    found = train_math(short(tmp_path, "plan=disaggregated", "cluster.num_devices=2"))
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert untimed_rows(tmp_path) == untimed_rows(folder)


def test_without_a_correction_it_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tis_cap is None, but with a staleness of 1.*tis_cap=2\.0"):
        train_math(tiny_math("plan.max_staleness=1", "algorithm.tis_cap=null", f"run.dir={tmp_path}/run"))
    assert list(tmp_path.iterdir()) == []
