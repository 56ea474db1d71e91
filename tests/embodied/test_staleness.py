"""Rollouts that run ahead of the update: the plan is only a matter of speed then, too, and nothing is lost."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from runs import GRPO, clone, digest, executor_for, iterate, metric_rows, tiny, train, trees
from training_faults import lost, once

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.session import SerialSession, Session

CORRECTED = "algorithm.tis_cap=2.0"
CARRIED = ["env.carry_over=true", CORRECTED]
PLANS = {
    "collocated on 1": (1, trees("all", "all", "all")),
    "collocated on 2": (2, trees("all", "all", "all")),
    "learner apart": (3, trees("0:2/3", "0:2/3", "2/3:1")),
    "disaggregated on 3": (3, trees("0:1/3", "1/3:2/3", "2/3:1", shards=2)),
    "hybrid on 2": (2, trees("0:1/2", "1/2:1", "all", shards=2)),
}
VARIANTS = {"ppo, carried over": CARRIED, "grpo": [*GRPO, CORRECTED]}


def trained(
    variant: str, plan: str, staleness: int, session: Session | None = None
) -> tuple[str, list[dict[str, float]]]:
    config, (devices, tree) = tiny(*VARIANTS[variant]), PLANS[plan]
    ahead = [{**entry, "staleness": staleness} for entry in tree]
    executor = executor_for(config, ahead, devices, session or SerialSession(), clone(config))
    metrics = iterate(executor, 4)
    return digest(executor), metrics


@functools.cache
def by_one_worker(variant: str, staleness: int) -> tuple[str, list[dict[str, float]]]:
    return trained(variant, "collocated on 1", staleness)


@pytest.mark.parametrize(
    ("variant", "plan", "staleness"),
    [
        ("ppo, carried over", "learner apart", 1),
        ("ppo, carried over", "hybrid on 2", 2),
        ("grpo", "disaggregated on 3", 1),
        pytest.param("ppo, carried over", "collocated on 2", 1, marks=pytest.mark.slow),
        pytest.param("grpo", "hybrid on 2", 2, marks=pytest.mark.slow),
    ],
)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(variant, plan, staleness) -> None:
    expected, metrics = by_one_worker(variant, staleness)
    assert [row["rollout/staleness"] for row in metrics] == [float(min(n, staleness)) for n in range(4)]
    assert metrics[-1]["losses/initial_log_ratio"] > 1e-3  # other weights sampled than were trained
    assert trained(variant, plan, staleness) == (expected, metrics)
    assert expected != by_one_worker(variant, 0)[0]


@pytest.mark.slow
@pytest.mark.ray
def test_real_workers_give_the_weights_of_one_process(ray_session) -> None:
    found = trained("ppo, carried over", "learner apart", 1, ray_session)
    assert found == by_one_worker("ppo, carried over", 1)


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
