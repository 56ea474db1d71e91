"""The benchmarks measure what they say: one workload for all pieces, true spreads, goals that can be missed."""

from __future__ import annotations

import json

import pytest
from conftest import load_script

from rlinf_embodied.compose import compose_train
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.trace import Span

SMALL = [
    "env.num_envs=8",
    "env.block_size=2",
    "env.obs_size=16",
    "env.horizon=10",
    "policy.hidden_size=32",
    "policy.num_layers=1",
    "policy.num_heads=2",
    "policy.stem_width=16",
    "policy.keypoints=4",
    "policy.num_bins=9",
    "policy.critic_hidden_size=16",
]


@pytest.fixture(scope="module")
def report():
    return load_script("bench_report")


def test_a_spread_is_median_smallest_and_largest(report):
    spread = report.Spread.of([3.0, 1.0, 8.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (3.0, 1.0, 8.0, 3)
    assert f"{spread:.1f}" == "3.0 (1.0-8.0)"


def test_ratios_are_taken_round_by_round(report):
    spread = report.ratios([10.0, 40.0], [5.0, 10.0])  # a slow round slows both sides: 2 and 4, not 25 / 7.5
    assert (spread.low, spread.high) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(20.0, "reached"), (10.0, "missed (floor 8: held)"), (5.0, "missed (floor 8: missed)")]
)
def test_a_goal_says_whether_it_is_reached(report, ratio, verdict):
    goal = report.Goal("speed", report.Spread.of([ratio]), 20.0, floor=8.0)
    assert str(goal).endswith(verdict)
    assert goal.to_json()["reached"] is (ratio >= 20.0)


def test_a_benchmark_takes_its_own_arguments_and_leaves_the_overrides(report):
    own, overrides = report.split_arguments(["rounds=7", "env.num_envs=32", "out=a=b"], {"rounds": 5, "out": ""})
    assert own == {"rounds": 7, "out": "a=b"}
    assert overrides == ["env.num_envs=32"]
    with pytest.raises(ConfigError, match=r"rounds is 'many', but it must be a int: use rounds=5"):
        report.split_arguments(["rounds=many"], {"rounds": 5})


def test_cases_are_chosen_by_name_in_the_order_asked_for_and_all_without_names(report):
    cases = {"serial": 1, "apart": 2, "together": 3}
    assert list(report.chosen("together,serial", cases).items()) == [("together", 3), ("serial", 1)]
    assert report.chosen("", cases) == cases
    with pytest.raises(ConfigError, match="cases has 'pik', but there are serial, apart, together: use some of these"):
        report.chosen("serial,pik", cases)


def test_results_are_json_with_goals_and_spreads_as_plain_values(report, tmp_path):
    goal = report.Goal("speed", report.Spread.of([2.0]), 1.0)
    report.write_results(str(tmp_path / "new" / "r.json"), {"goals": [goal], "speed": report.Spread.of([1.0, 2.0])})
    content = json.loads((tmp_path / "new" / "r.json").read_text())
    assert content["goals"][0]["reached"] is True
    assert content["speed"] == {"median": 1.5, "low": 1.0, "high": 2.0, "count": 2}


def test_only_results_of_the_same_benchmark_can_be_joined(report, tmp_path):
    assert report.earlier_results("", "auto") == {}
    with pytest.raises(ConfigError, match=r"join is 'nowhere.json', which cannot be read .*: give an earlier out="):
        report.earlier_results("nowhere.json", "auto")
    (tmp_path / "r.json").write_text('{"benchmark": "ablation", "rows": []}')
    with pytest.raises(ConfigError, match="which benchmark 'auto' did not write"):
        report.earlier_results(str(tmp_path / "r.json"), "auto")
    assert report.earlier_results(str(tmp_path / "r.json"), "ablation")["rows"] == []


def test_commands_name_every_run_that_results_are_from(report):
    first = {"arguments": ["cases=a"], "machine": {}}
    second = report.joined({"arguments": ["cases=b"]}, first, ["a"])
    text = "`python experiments/x.py cases=b`, joined with `python experiments/x.py cases=a` (a)"
    assert report.commands("x.py", second) == text
    assert report.joined({"arguments": []}, first, []) == {"arguments": []}
    assert "a run whose command is not recorded (a)" in report.commands("x.py", report.joined(first, {}, ["a"]))


def test_a_table_in_markdown_keeps_bars_within_its_cells(report):
    assert report.markdown(("a", "b"), [("x || y", "1")]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        r"| x \|\| y | 1 |",
    ]


def test_what_the_busiest_worker_spends_in_no_stage_is_outside(report):
    plans = load_script("bench_plans")
    measured = plans.Measured()
    spans = [Span("env.step", "env", 0, "cpu", 0.0, 2.0), Span("policy.step", "policy", 0, "cpu", 2.0, 3.0)]
    spans += [Span("env.step", "env", 1, "cpu", 0.0, 1.0)]
    plans.account(measured, 4.0, spans, {"rollout/env_steps": 100.0})
    assert measured.outside.median == 0.25  # worker 0 is busy for 3 of 4 s
    assert measured.stages_s == [{"time/env_s": 2.0, "time/policy_s": 1.0}]


@pytest.mark.sim
def test_stock_env_rollout_and_limit_do_the_same_work(report, tmp_path):
    load_script("bench_limit")
    parts = load_script("bench_parts")
    from envs.maniskill import make_env
    from policies.tiny_vla import TinyVLA
    from rlinf_embodied.embodied.policy_folder import save_policy

    config = parts.bench_config(compose_train(SMALL), chunk_steps=3)  # a horizon of two chunks: every row is reset once
    env = make_env(config.env, 1)
    save_policy(TinyVLA(config.policy, env.spec, seed=0), tmp_path, config.env, config.policy)
    env.close()
    bench = parts.Bench(config, str(tmp_path), worker=0, num_workers=2, stock_steps=3)
    timings = {name: getattr(bench, name)() for name in ("rollout", "env", "limit")}  # limit checks the end state
    steps = {name: timing.env_steps for name, timing in timings.items()}
    assert set(steps.values()) == {4 * 3 * 5}
    assert set(timings["limit"].parts) == {"kinematics", "physics", "pictures", "policy"}
    assert timings["limit"].seconds == pytest.approx(sum(timings["limit"].parts.values()))
    assert bench.stock().env_steps == 3
    assert bench.rollout().env_steps == 60  # nothing of the recorder is left behind
