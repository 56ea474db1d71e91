"""The coverage benchmark: its table, and how it takes a task whose process dies."""

from __future__ import annotations

import pytest

from experiments.bench.coverage import __main__ as script
from experiments.bench.coverage.table import page
from experiments.bench.harness import command

EQUAL = {"verdict": "equal", "reason": "", "row_steps": 90, "looked": 20, "touching": 5}
TASKS = {
    "A-v1": {
        "reason": "",
        "default_robot": "panda",
        "robots": {
            "panda": {"joints": {**EQUAL, "default": True, "pictures": 10}, "hand": EQUAL},
            "fetch": {"joints": {"verdict": "fallback", "reason": "cube of row 1 differs"}},
            "far": {"default": {"verdict": "needs files", "reason": "needs `download far`"}},
        },
    },
    "B-v1": {"reason": "needs `download B`", "robots": {}},
}


def test_the_table_counts_verdicts_and_gives_reasons() -> None:
    machine = {"date": "2026-11-21 10:00", "processor": "P", "versions": {"mani_skill": "3.0.1", "sapien": "3.0.3"}}
    text = page(TASKS, {"arguments": ["fresh=true"], "machine": machine})
    assert "`python -m experiments.bench.coverage fresh=true`, 2026-11-21, P, mani_skill 3.0.1, sapien 3.0.3." in text
    assert "**1 tasks, 4 combinations" in text
    assert "2 equal, 1 fallback, 0 different" in text
    line = next(line for line in text.splitlines() if line.startswith("| A-v1"))
    assert "| 180 | 10 | 25% |" in line
    assert "- A-v1 (fetch/joints): fallback: cube of row 1 differs" in text
    assert "- B-v1: needs `download B`" in text


def test_a_name_that_is_no_task_is_refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "use_one_thread_per_process", lambda: None)  # this process is the tests'
    assert script.BENCHMARK.main(["tasks=PickCub-v1"]) == 2
    assert "tasks has PickCub-v1, but ManiSkill knows no such task" in capsys.readouterr().err
    assert script.BENCHMARK.main(["task=PickCube-v1"]) == 2
    assert "task is unknown" in capsys.readouterr().err
