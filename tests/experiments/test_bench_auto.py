"""What bench_auto.py concludes from its measurements, and the profile that profile_stages.py writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from conftest import REPOSITORY, load_script
from runs import tiny_overrides

from rlinf_embodied.flow.drift import Prediction
from rlinf_embodied.flow.plan import Leaf, Plan
from rlinf_embodied.flow.profile_file import load_profile


@pytest.fixture(scope="module")
def report():
    load_script("bench_report")
    return load_script("auto_report")


@pytest.fixture(scope="module")
def bench(report):
    return load_script("bench_auto")


def candidates(bench, **seconds: list[float]) -> dict:
    plan = Plan("p", 1, Leaf("env", (0,)))
    return {
        name: bench.Candidate(plan, Prediction(1.1, {"env": 1.0}), list(values), "d")
        for name, values in seconds.items()
    }


def found(bench, **seconds: list[float]) -> dict:
    return bench.outcomes(candidates(bench, **seconds))


@pytest.mark.parametrize(
    ("auto", "good", "said"),
    [
        ([0.9, 1.0, 1.0], True, "the fastest"),
        ([1.02, 1.02, 1.02], True, "2.0% behind collocated, within 3%"),
        ([1.0, 1.1, 1.2], True, "10.0% behind collocated, within the spread"),
        ([1.19, 1.2, 1.3], False, "20.0% behind collocated"),
    ],
)
def test_the_picked_plan_is_judged_by_the_medians_three_per_cent_and_the_spread(
    report, bench, auto, good, said
) -> None:
    assert report.verdict(found(bench, collocated=[0.9, 1.0, 1.05], apart=[2.0, 2.0, 2.0], auto=auto)) == (good, said)


def test_errors_are_over_all_plans_of_all_workloads(report, bench) -> None:
    results = {"a": found(bench, collocated=[1.0], auto=[1.1]), "b": found(bench, auto=[2.2])}
    content = report.summary(results)
    assert math.isclose(content["median_error"], 0.1)
    assert math.isclose(content["worst_error"], 0.5)
    assert content["workloads"]["b"]["auto"]["error"] == pytest.approx(-0.5)


def test_a_report_is_json_a_table_and_a_picture(report, bench, tmp_path) -> None:
    results = {"a": found(bench, collocated=[1.0], auto=[1.1])}
    report.write_report(str(tmp_path / "auto.json"), results, {"arguments": ["cases=a"]} | report.summary(results))
    assert json.loads((tmp_path / "auto.json").read_text())["verdicts"] == {"a": "10.0% behind collocated"}
    assert "| a | auto | 1.10 | 1.10 (1.10-1.10) | +0.0% | 10.0% behind collocated |" in (
        (tmp_path / "auto.md").read_text()
    )
    assert (tmp_path / "auto.png").read_bytes()[:4] == b"\x89PNG"


def test_workloads_of_an_earlier_run_are_read_back_as_they_were(report, bench) -> None:
    plans = found(bench, collocated=[0.9, 1.0, 1.05], auto=[1.0, 1.1, 1.2])
    written = json.loads(json.dumps({name: outcome.to_json() for name, outcome in plans.items()}))
    assert report.read(written) == plans


def test_what_is_measured_anew_replaces_an_earlier_run_and_the_rest_is_kept(bench, tmp_path, monkeypatch) -> None:
    slow = {"collocated": [2.0], "auto": [2.0]}
    monkeypatch.setattr(bench, "use_one_thread_per_process", lambda: None)  # this process is the tests'
    monkeypatch.setattr(bench, "run_case", lambda words, iterations: candidates(bench, **slow))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert bench.main(["cases=pick,point_reach", f"out={first}"]) == 0
    slow["auto"] = [3.0]
    assert bench.main(["cases=point_reach", f"join={first}", f"out={second}"]) == 1  # now behind
    joined = json.loads(second.read_text())
    medians = {case: plans["auto"]["measured_s"]["median"] for case, plans in joined["workloads"].items()}
    assert medians == {"pick": 2.0, "point_reach": 3.0}
    assert (joined["joined"]["kept"], joined["joined"]["arguments"][0]) == (["pick"], "cases=pick,point_reach")
    assert (
        "joined with `python experiments/bench_auto.py cases=pick,point_reach" in (tmp_path / "second.md").read_text()
    )


def test_the_published_table_is_what_the_published_numbers_say(report) -> None:
    content = json.loads((REPOSITORY / "docs/results/auto.json").read_text())
    results = {case: report.read(plans) for case, plans in content["workloads"].items()}
    text = (REPOSITORY / "docs/results/auto.md").read_text()
    rows = [row for case, plans in results.items() for row in report.lines_of(case, plans)]
    assert [row for row in rows if "| " + " | ".join(row) + " |" not in text] == []
    found = report.summary(results)
    assert {key: content[key] for key in ("median_error", "worst_error", "verdicts")} == {
        key: found[key] for key in ("median_error", "worst_error", "verdicts")
    }


def test_every_workload_is_one_that_trains(bench) -> None:
    for overrides in bench.CASES.values():
        assert bench.composed(overrides).plan.is_auto


def test_profile_stages_writes_a_profile_that_plans_can_be_made_with(tmp_path) -> None:
    overrides = tiny_overrides(
        f"run.dir={tmp_path / 'profile'}", "cluster.num_devices=2", "plan.profile_budget_s=0.1", "eval.num_episodes=2"
    )
    command = [sys.executable, "experiments/profile_stages.py", *overrides]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "chunk-step" in answer.stdout
    assert set(load_profile(tmp_path / "profile/profile.json").stages) == {"env", "policy", "actor"}
    command = [sys.executable, "experiments/plan.py", f"profile={tmp_path / 'profile/profile.json'}", "cluster=local"]
    answer = subprocess.run(
        [*command, f"run.dir={tmp_path / 'plan'}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads((tmp_path / "plan/plan.json").read_text())["predicted_s_per_iteration"] > 0
