"""What the benchmark of plan=auto concludes from its measurements."""

from __future__ import annotations

import json

import pytest
from runs import tiny_overrides

from experiments.bench import auto as bench
from experiments.bench.harness import Run, Spread
from experiments.bench.harness.trainings import outside_stages
from experiments.profile_stages import compose_job
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.trace import Span


def found(**seconds: list[float]) -> dict[str, bench.Outcome]:
    outside = Spread.of([0.25])
    return {n: bench.Outcome("env on 0", 1.1, {"env": 1.0}, Spread.of(s), outside, "d") for n, s in seconds.items()}


@pytest.mark.parametrize(
    ("auto", "good", "said"),
    [
        ([0.9, 1.0, 1.0], True, "the fastest"),
        ([1.02, 1.02, 1.02], True, "2.0% behind collocated, within 3%"),
        ([1.0, 1.1, 1.2], True, "10.0% behind collocated, within the spread"),
        ([1.19, 1.2, 1.3], False, "20.0% behind collocated"),
    ],
)
def test_the_picked_plan_is_judged_by_the_medians_three_per_cent_and_the_spread(auto, good, said) -> None:
    assert bench.verdict(found(collocated=[0.9, 1.0, 1.05], apart=[2.0, 2.0, 2.0], auto=auto)) == (good, said)


def test_what_the_busiest_worker_spends_in_no_stage_is_outside() -> None:
    spans = [Span("env.step", "env", 0, "cpu", 0.0, 2.0), Span("policy.step", "policy", 0, "cpu", 2.0, 3.0)]
    spans += [Span("env.step", "env", 1, "cpu", 0.0, 1.0)]
    assert outside_stages(spans, 4.0) == 0.25  # worker 0 is busy for 3 of 4 s


def test_outcomes_are_a_table_and_json(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "run_case", lambda *asked: (found(collocated=[1.0], auto=[1.1]), 7.0))
    asked = bench.Options(cases="pick", out=str(tmp_path / "auto.json"))
    assert bench.measure(Run(asked, [], {"benchmark": "auto"})) == 1
    assert json.loads((tmp_path / "auto.json").read_text())["verdicts"] == {"pick": "10.0% behind collocated"}
    printed = capsys.readouterr().out
    assert "1.10 (1.10-1.10)  +0.0%   10.0% behind collocated" in printed
    assert "errors of the predictions: median 5.0%, worst 10.0%" in printed


def test_every_workload_is_one_that_trains() -> None:
    for overrides in bench.CASES.values():
        assert compose_job(overrides).plan.is_auto


def test_a_misspelt_workflow_is_not_taken_for_the_default() -> None:
    with pytest.raises(ConfigError, match=r"workflow is 'reasonning', but it is embodied or reasoning"):
        compose_job(["workflow=reasonning"])


@pytest.mark.ray
@pytest.mark.slow
def test_an_iteration_under_each_plan_has_predicted_and_measured_seconds(ray_cluster) -> None:
    short = ["warm_start.from_scratch=true", "env.chunks_per_rollout=3", "plan.profile_budget_s=1"]
    found, _ = bench.run_case([*tiny_overrides(*short), "cluster.num_devices=2"], 1, names=["collocated"])
    assert set(found) == {"auto", "collocated"}
    assert all(plan.error == plan.predicted_s / plan.measured_s.median - 1 for plan in found.values())
