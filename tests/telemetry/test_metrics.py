"""Metrics, rates and tables, paired comparisons, the lock of a run folder, start-up times and the live view."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binomtest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_embodied.data.video import write_video
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.boards import Histogram, TensorBoard
from rlinf_embodied.telemetry.live import Column, LiveView
from rlinf_embodied.telemetry.metrics import MetricsWriter, Rate, wilson
from rlinf_embodied.telemetry.paired import PairedRate, paired_mean
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.tables import described_table, text_table
from rlinf_embodied.telemetry.trace import Span, StartupClock


def test_a_rate_says_its_share_with_its_interval_in_words_and_as_json():
    rate = Rate(15, 50)
    assert str(rate) == "30.0 % [19.1, 43.8]"
    assert rate.summary("success") == {"success": 0.3, "success_interval": list(wilson(15, 50))}


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # 15 of 50: (.3 + .038415 +- 1.96 sqrt(.0042 + .000384)) / 1.07683; 0 of 10: the upper end is 3.8415 / 13.8415
    [(15, 50, 0.1910, 0.4375), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (90, 100, 0.8256, 0.9448)],
)
def test_the_interval_is_that_of_wilson(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 5000), st.floats(0, 1))
def test_the_interval_lies_in_the_unit_interval_and_holds_the_rate(n, share):
    successes = round(share * n)
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert high > low
    mirrored = wilson(n - successes, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_without_episodes_anything_is_possible():
    assert wilson(0, 0) == (0.0, 1.0)


def read_rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_board(folder, name: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_each_iteration_is_a_json_object_and_a_point_on_the_board(tmp_path):
    writer = MetricsWriter(tmp_path, [TensorBoard(tmp_path)])
    writer.write(640, 1, {"rollout/success_once": 0.5, "losses/explained_variance": math.nan})
    writer.write(1280, 2, {"rollout/success_once": 0.75})
    writer.close()
    assert read_rows(tmp_path) == [
        {"iteration": 1, "global_step": 640, "rollout/success_once": 0.5, "losses/explained_variance": None},
        {"iteration": 2, "global_step": 1280, "rollout/success_once": 0.75},
    ]
    assert read_board(tmp_path, "rollout/success_once") == [(640, 0.5), (1280, 0.75)]


def test_the_board_shows_histograms_and_videos(tmp_path):
    counts = Histogram.count(torch.tensor([-9.0, 0.01, 0.01, 0.99, math.nan]), 1.0)
    write_video(
        tmp_path / "videos" / "a--seed=7--success=0.mp4",
        [np.full((64, 64, 3), k, np.uint8) for k in range(120)],
        20,
        {"crf": "20"},
    )
    writer = MetricsWriter(tmp_path, [TensorBoard(tmp_path)])
    writer.show_videos(0, tmp_path / "videos")
    writer.write(640, 1, {"rollout/action_0": Histogram(counts.tolist(), 1.0)})
    writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (found,), (film,) = board.Histograms("rollout/action_0"), board.Images("videos/a--seed=7")
    bins = zip(found.histogram_value.bucket_limit, found.histogram_value.bucket, strict=True)
    held = {round(limit, 2): n for limit, n in bins if n}
    assert (found.step, held) == (640, {-0.95: 1, 0.05: 2, 1.0: 1})
    with Image.open(io.BytesIO(film.encoded_image_string)) as image:
        assert (film.step, getattr(image, "n_frames", 1), image.info["duration"]) == (0, 60, 100)  # every second frame


def test_a_resumed_run_continues_the_files_as_if_it_had_never_stopped(tmp_path):
    writer = MetricsWriter(tmp_path, [TensorBoard(tmp_path)])
    for iteration in (1, 2, 3):
        writer.write(10 * iteration, iteration, {"charts/SPS": float(iteration)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "glob')  # killed while writing
    writer = MetricsWriter(tmp_path, [TensorBoard(tmp_path)])  # resumes from a checkpoint of iteration 2
    writer.write(30, 3, {"charts/SPS": 33.0})
    writer.write(40, 4, {"charts/SPS": 44.0})
    writer.close()
    assert [(row["iteration"], row["charts/SPS"]) for row in read_rows(tmp_path)] == [(1, 1), (2, 2), (3, 33), (4, 44)]
    assert read_board(tmp_path, "charts/SPS") == [(10, 1), (20, 2), (30, 33), (40, 44)]


def test_a_run_that_writes_nothing_leaves_no_files(tmp_path):
    MetricsWriter(tmp_path, [TensorBoard(tmp_path)]).close()
    assert list(tmp_path.iterdir()) == []


def test_outcomes_are_counted_in_pairs() -> None:
    found = PairedRate.of([True, True, False, False, True], [True, False, True, False, False])
    assert found == PairedRate(both=1, only_a=2, only_b=1, neither=1)
    assert (found.number, found.difference) == (5, -0.2)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (5, 5), (3, 14), (40, 90), (500, 570)])
def test_p_is_that_of_the_exact_binomial_test(a: int, b: int) -> None:
    expected = binomtest(min(a, b), a + b).pvalue if a + b else 1.0
    assert PairedRate(100, a, b, 7).p_value == pytest.approx(expected)


def test_interval_and_number_are_those_of_the_publications_by_hand() -> None:
    found = PairedRate(both=120, only_a=10, only_b=26, neither=44)  # n = 200
    # 10.5 and 26.5 of 202: d = 16 / 202, its standard error sqrt(37 - 256 / 202) / 202 = 0.029590
    assert found.interval == pytest.approx((0.079208 - 1.959964 * 0.029590, 0.079208 + 1.959964 * 0.029590), abs=1e-5)
    # q = 37 / 202 = 0.183168: ((1.959964 * 0.427982 + 0.841621 * sqrt(0.180668)) / 0.05)^2 = 572.9
    assert found.num_needed(0.05) == 573
    assert found.num_needed(0.2) == 37  # q = 0.2: no fewer differ than the difference itself
    same = PairedRate(90, 0, 0, 110)
    assert same.p_value == 1.0
    assert same.interval[0] == -same.interval[1] == pytest.approx(-1.959964 / 202)


def test_means_are_paired() -> None:
    assert paired_mean([1.0, 5.0], [1.0, 5.0]) == {"difference": 0.0, "difference_interval": [0.0, 0.0]}
    found = paired_mean([1.0, 5.0, 9.0], [2.0, 7.0, 12.0])  # 1, 2, 3
    half = 1.959964 / math.sqrt(3)
    assert found["difference_interval"] == pytest.approx([2 - half, 2 + half])


ROWS = [
    {"plan": "(env > policy) || actor", "s": "1.25", "why not": "the best"},
    {
        "plan": "env || (policy > actor)",
        "s": "10.50",
        "why not": "+9.25 s (740%); env computes 8 s on 1 devices, 2 s on 2",
    },
]


def test_long_columns_stand_below_their_row_and_are_never_cut():
    lines = described_table(ROWS, ("plan", "why not"), "plans:").splitlines()
    assert lines[0] == "plans:"
    assert lines[1].split() == ["#", "s"]
    assert lines[3].split() == ["1", "1.25"]
    assert lines[4] == "   plan     (env > policy) || actor"
    assert lines[5] == "   why not  the best"
    assert lines[8] == "   why not  +9.25 s (740%); env computes 8 s on 1 devices, 2 s on 2"


def test_a_table_is_as_wide_as_its_cells():
    lines = text_table([{"a": "x" * 100, "b": "1"}]).splitlines()
    assert lines[2] == "x" * 100 + "  1"


HOLD = """
import sys
from pathlib import Path
from rlinf_embodied.telemetry.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), locked=True)
print("locked", flush=True)
sys.stdin.read()
"""


def test_another_run_is_refused_while_one_writes_the_folder_and_not_after_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=r"another run writes it: wait for its end, or use another run\.dir"):
            RunFolder(tmp_path, locked=True)
        process.kill()
    RunFolder(tmp_path, locked=True).unlock()


def test_a_note_of_another_host_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"host": "a pod that is gone", "pid": 1}')
    RunFolder(tmp_path, locked=True).unlock()


def step(name: str, start_s: float) -> Span:
    return Span(name, name.split(".")[0], 0, "cpu", start_s, start_s + 1.0)


def test_phases_add_up_to_the_time_until_the_first_step():
    clock = StartupClock(time.time() - 5.0, "env.step")
    clock.mark("imports")
    clock.mark("ray")
    later = time.time() + 2.0
    assert clock.first([step("policy.step", later - 1.0), step("eval_env.step", later + 1.0), step("env.step", later)])
    assert list(clock.phases) == ["imports", "ray", "before work"]
    assert clock.phases["imports"] == pytest.approx(5.0, abs=0.1)
    assert clock.phases["before work"] == pytest.approx(2.0, abs=0.1)
    assert clock.total_s == pytest.approx(sum(clock.phases.values()))
    assert str(clock).startswith("first env.step after 7.0 s: imports 5.0, ray 0.0")


def test_the_start_up_ends_once():
    clock = StartupClock(time.time(), "env.step")
    assert not clock.first([step("policy.step", time.time())])  # no env has stepped
    assert clock.first([step("env.step", time.time())])
    total = clock.total_s
    clock.mark("later")
    assert not clock.first([step("env.step", time.time() + 9.0)])
    assert clock.total_s == total
    assert "later" not in clock.phases


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
