from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

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


def make_view(terminal: bool, num_iterations: int = 41) -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=140, highlight=False, color_system=None)
    return LiveView(num_iterations, "PickCube-v1 · ppo", COLUMNS, console), stream


def test_without_a_terminal_each_iteration_is_one_line():
    view, stream = make_view(terminal=False)
    with view:
        view.note("evaluating before")
        view.update(1, METRICS)
        view.update(2, {"rollout/return": math.nan})
    first, second, third = stream.getvalue().splitlines()
    assert first == "evaluating before"
    # 40 iterations of 90 s are left: one hour
    assert second == (
        "iteration 1/41  success 62.5 %  return 12.35  410 env steps/s  seconds: env 61.2  actor 20.0  ETA 1:00:00"
    )
    assert third.startswith("iteration 2/41  success -  return -  - env steps/s  seconds: -  ETA ")
    assert "\x1b" not in stream.getvalue()


def test_without_a_terminal_progress_is_not_a_flood():
    view, stream = make_view(terminal=False)
    with view:
        for done in range(1, 201):
            view.progress("demonstrations", done, 200, "ok")
        view.progress("cloning", 1, 1)
    assert stream.getvalue().splitlines() == ["demonstrations 1/200 ok", "demonstrations 200/200 ok", "cloning 1/1"]


def test_in_a_terminal_the_last_iterations_stand_in_a_table():
    view, stream = make_view(terminal=True)
    with view:
        view.progress("demonstrations", 40, 200, "99 % solved")
        assert "demonstrations 40/200 99 % solved" in stream.getvalue()
        for iteration in range(1, 13):
            view.update(iteration, METRICS)
        view.note("evaluation at 12")
    last = stream.getvalue().split("evaluation at 12")[1]
    for text in ("PickCube-v1 · ppo", "env steps/s", "12/41", "5/41", "62.5 %", "12.35", "env 61.2  actor 20.0"):
        assert text in last
    assert "4/41 " not in last.replace("14/41", "")
    assert "demonstrations" not in last


@pytest.mark.parametrize("terminal", [True, False])
def test_the_last_line_is_the_last_even_if_the_run_fails(terminal):
    view, stream = make_view(terminal)

    def run() -> None:
        with view:
            view.last_line("success before 50 %, after 90 %")
            view.note("curve here")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run()
    assert stream.getvalue().endswith("success before 50 %, after 90 %\n")


def test_brackets_in_notes_are_no_markup():
    view, stream = make_view(terminal=False)
    view.note("success 90.0 % [85.1, 93.4] [red]")
    assert stream.getvalue() == "success 90.0 % [85.1, 93.4] [red]\n"


def test_every_line_is_kept_in_a_file(tmp_path) -> None:
    path = tmp_path / "console.log"
    with LiveView(2, "run", console=Console(file=io.StringIO()), log=path) as view:
        view.note("plan collocated")
        view.update(1, {"time/env_s": 1.0})
        view.last_line("done")
    assert [line.split(" ", 1)[1].split("  ")[0] for line in path.read_text().splitlines()] == [
        "plan collocated",
        "iteration 1/2",
        "done",
    ]
