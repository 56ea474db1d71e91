"""What the ablation shows of its rows, and how rows of an earlier run are joined."""

from __future__ import annotations

import json

from conftest import REPOSITORY

from experiments.bench import ablation
from experiments.bench.harness import Table, command


def test_ratios_are_to_the_same_place_with_everything_on() -> None:
    rows = [
        *(ablation.Row("here", "(all on)", "auto", [2.0, 4.0, 3.0]), ablation.Row("here", "scheduler", "apart", [6.0])),
        *(
            ablation.Row("there", "(all on)", "auto", [1.0]),
            ablation.Row("there", "scheduler", "spatial", [], "infeasible"),
        ),
    ]
    shown = [line[3:] for line in ablation.lines_of(rows)]
    assert shown == [
        *(("3.00 (2.00-4.00)", "1.00", ""), ("6.00 (6.00-6.00)", "2.00", "")),
        *(("1.00 (1.00-1.00)", "1.00", ""), ("-", "-", "infeasible")),
    ]


def test_rows_of_places_that_are_not_measured_now_are_kept(tmp_path, monkeypatch) -> None:
    rows = [ablation.Row("local", "(all on)", "auto", [2.0])]
    monkeypatch.setattr(command, "use_one_thread_per_process", lambda: None)  # this process is the tests'
    monkeypatch.setattr(ablation, "local_rows", lambda *_: rows)
    monkeypatch.setattr(ablation, "emulated_rows", lambda *_: [ablation.Row("EMULATED x", "(all on)", "auto", [9.0])])
    assert ablation.BENCHMARK.main(["where=local,emulated", f"out={tmp_path / 'first'}"]) == 0
    rows[0].seconds = [5.0]
    assert (
        ablation.BENCHMARK.main(["where=local", f"join={tmp_path / 'first.json'}", f"out={tmp_path / 'second'}"]) == 0
    )
    second = json.loads((tmp_path / "second.json").read_text())
    assert {row["where"]: row["seconds"] for row in second["rows"]} == {"EMULATED x": [9.0], "local": [5.0]}
    assert second["joined"]["kept"] == ["EMULATED x"]
    assert "| local | (all on) | auto | 5.00 (5.00-5.00) | 1.00 |  |" in (tmp_path / "second.md").read_text()


def test_the_published_table_is_what_the_published_numbers_say() -> None:
    content = json.loads((REPOSITORY / "docs/results/ablation.json").read_text())
    lines = ablation.lines_of([ablation.Row(**row) for row in content["rows"]])
    table = Table(ablation.HEADER, lines).markdown().splitlines()
    text = (REPOSITORY / "docs/results/ablation.md").read_text()
    assert [line for line in table[2:] if line not in text] == []
