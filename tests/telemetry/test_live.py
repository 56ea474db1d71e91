"""Progress is printed as plain lines, and kept in a file."""

from __future__ import annotations

import math

import pytest

from rlinf_embodied.telemetry.live import Column, LiveView

COLUMNS = (
    Column("success", "rollout/success_once", ".1f", " %", 100.0),
    Column("return", "rollout/return", ".2f"),
    Column("env steps/s", "charts/SPS", ".0f", after=True),
)
METRICS = {
    "rollout/success_once": 0.625,
    "rollout/return": 12.345,
    "charts/SPS": 410.4,
    "time/iteration_s": 90.0,
    "time/total_s": 90.0,
    "time/env_s": 61.25,
    "time/actor_s": 20.0,
}


def test_each_iteration_is_one_line(capsys) -> None:
    with LiveView(41, COLUMNS) as view:
        view.note("evaluating before [85.1, 93.4]")
        view.update(1, METRICS)
        view.update(2, {"rollout/return": math.nan})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "evaluating before [85.1, 93.4]"
    # 40 iterations of 90 s are left: one hour
    assert second == (
        "iteration 1/41  success 62.5 %  return 12.35  410 env steps/s  seconds: env 61.2  actor 20.0  ETA 1:00:00"
    )
    assert third.startswith("iteration 2/41  success -  return -  - env steps/s  seconds: -  ETA ")


def test_progress_is_not_a_flood(capsys) -> None:
    with LiveView(41) as view:
        for done in range(1, 201):
            view.progress("demonstrations", done, 200, "ok")
        view.progress("cloning", 1, 1)
    assert capsys.readouterr().out.splitlines() == [
        "demonstrations 1/200 ok",
        "demonstrations 200/200 ok",
        "cloning 1/1",
    ]


def test_the_last_line_is_the_last_even_if_the_run_fails_and_every_line_is_kept_in_a_file(tmp_path, capsys) -> None:
    path = tmp_path / "console.log"

    def run() -> None:
        with LiveView(2, log=path) as view:
            view.last_line("success before 50 %, after 90 %")
            view.note("curve here")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run()
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["curve here", "success before 50 %, after 90 %"]
    assert [line.split(" ", 1)[1] for line in path.read_text().splitlines()] == printed
