"""The coverage script: its table, and how it takes a task whose process dies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import load_script

EQUAL = {"verdict": "equal", "alone": "nothing", "reason": "", "row_steps": 90, "looked": 20, "touching": 5}
TASKS = {
    "A-v1": {
        "reason": "",
        "default_robot": "panda",
        "robots": {
            "panda": {"joints": {**EQUAL, "default": True, "pictures": 10}, "hand": {**EQUAL, "alone": "everything"}},
            "fetch": {"joints": {"verdict": "fallback", "alone": None, "reason": "cube of row 1 differs"}},
            "far": {"default": {"verdict": "needs files", "reason": "needs `download far`"}},
        },
    },
    "B-v1": {"reason": "needs `download B`", "robots": {}},
}


@pytest.fixture
def table():
    return load_script("coverage_table")


@pytest.mark.sim
def test_the_table_counts_verdicts_and_gives_reasons(table, tmp_path: Path) -> None:
    content = {"command": ["python", "x"], "date": "2026-11-21 10:00", "processor": "P", "tasks": TASKS}
    table.write_table(tmp_path / "c.md", content)
    text = (tmp_path / "c.md").read_text()
    assert "**1 tasks, 4 combinations" in text
    assert "2 equal, 1 fallback, 0 different" in text
    line = next(line for line in text.splitlines() if line.startswith("| A-v1"))
    assert "| 180 | 10 | 25% | for all rows at once (1); row by row (1) |" in line
    assert "- A-v1 (fetch/joints): fallback: cube of row 1 differs" in text
    assert "- B-v1: needs `download B`" in text


@pytest.mark.sim
def test_what_was_found_is_what_the_backend_looks_up(table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched import choice
    from rlinf_embodied.errors import SimulatorError

    tasks = {"PickCube-v1": TASKS["A-v1"]}
    for module in (table, choice):
        monkeypatch.setattr(module, "COVERED", tmp_path / "covered.json")
    table.write_covered(tasks)
    choice._table.cache_clear()
    try:
        assert choice.how_to_run("PickCube-v1") == "nothing"
        assert choice.how_to_run("PickCube-v1", control_mode="hand", obs_mode="rgb") == "everything"
        assert choice.how_to_run("PickCube-v1", robot_uids="panda", control_mode="joints") == "nothing"
        with pytest.raises(SimulatorError, match=r"PickCube-v1.*cube of row 1 differs.*use env.backend=stock"):
            choice.how_to_run("PickCube-v1", robot_uids="fetch", control_mode="joints")
    finally:
        choice._table.cache_clear()


def test_a_process_that_dies_leaves_what_it_had_found_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load_script("bench_report")
    script = load_script("sim_coverage")
    worker = tmp_path / "worker.py"
    lines = [{"default_robot": "panda"}, {"robot": "panda", "mode": "joints", "verdict": "equal", "reason": ""}]
    worker.write_text(
        "import os, sys\n"
        "into = next(a for a in sys.argv if a.startswith('into=')).partition('=')[2]\n"
        f"open(into, 'w').write({chr(10).join(map(json.dumps, lines))!r})\n"
        "print('a body fell through', file=sys.stderr)\n"
        "sys.stderr.flush()\n"
        "os._exit(11)\n"
    )
    monkeypatch.setattr(script, "__file__", str(worker))
    found = script.run_worker("A-v1", [], 60)
    assert found["robots"] == {"panda": {"joints": {"verdict": "equal", "reason": ""}}}
    assert found["reason"] == "the process ended with 11: a body fell through"
    worker.write_text("import time\ntime.sleep(60)\n")
    assert script.run_worker("A-v1", [], 1)["reason"].startswith("the process had not ended after 1 s")


def test_results_of_named_modes_join_those_that_were_there() -> None:
    load_script("bench_report")
    script = load_script("sim_coverage")
    new = {"reason": "", "robots": {"panda": {"hand": EQUAL}, "so100": {"joints": EQUAL}}}
    joined = script.merged(TASKS["A-v1"], new)["robots"]
    assert joined["panda"]["hand"]["alone"] == "nothing"
    assert joined["panda"]["joints"] == TASKS["A-v1"]["robots"]["panda"]["joints"]
    assert set(joined) == {"panda", "fetch", "far", "so100"}


def test_a_name_that_is_no_task_is_refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    load_script("bench_report")
    monkeypatch.setitem(sys.modules, "coverage_runs", load_script("coverage_runs"))
    monkeypatch.setitem(sys.modules, "coverage_table", load_script("coverage_table"))
    assert load_script("sim_coverage").main(["tasks=PickCub-v1"]) == 2
    assert "tasks has PickCub-v1, but ManiSkill knows no such task" in capsys.readouterr().err
    assert load_script("sim_coverage").main(["task=PickCube-v1"]) == 2
    assert "unknown arguments task=PickCube-v1" in capsys.readouterr().err
