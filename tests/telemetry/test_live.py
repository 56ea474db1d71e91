"""Progress is printed as plain lines, and kept in a file."""

from __future__ import annotations

import math

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
    view = LiveView(41, COLUMNS)
    view.note("evaluating before [85.1, 93.4]")
    view.update(1, METRICS)
    view.update(2, {"rollout/return": math.nan, "rollout/episodes": 0.0})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "evaluating before [85.1, 93.4]"
    # 40 iterations of 90 s are left: one hour
    assert second == (
        "iteration 1/41  success 62.5 %  return 12.35  410 env steps/s  seconds: env 61.2  actor 20.0  ETA 1:00:00"
    )
    assert third == "iteration 2/41  no episode ended  seconds: -  ETA -"


def test_many_iterations_without_anything_to_learn_from_are_warned_of(capsys) -> None:
    view = LiveView(40)
    for number, useful in enumerate([3.0, *[0.0] * 12, 1.0, *[0.0] * 8], 1):
        view.update(number, {"rollout/useful_groups": useful})
    warnings = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("iteration")]
    assert warnings == []
    for number in range(23, 35):
        view.update(number, {"rollout/useful_groups": 0.0})
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("iteration")]
    assert "none of the last 16 iterations" in warning
    assert "larger algorithm.group_size" in warning


def test_progress_is_not_a_flood(capsys) -> None:
    view = LiveView(41)
    for done in range(1, 201):
        view.progress("demonstrations", done, 200, "ok")
    view.progress("cloning", 1, 1)
    assert capsys.readouterr().out.splitlines() == [
        "demonstrations 1/200 ok",
        "demonstrations 200/200 ok",
        "cloning 1/1",
    ]


def test_every_line_is_kept_in_a_file(tmp_path, capsys) -> None:
    view = LiveView(2, log=tmp_path / "console.log")
    view.note("curve here")
    view.progress("cloning", 1, 1)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in (tmp_path / "console.log").read_text().splitlines()] == printed
