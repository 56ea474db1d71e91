from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_embodied.embodied.outcome import write_mp4
from rlinf_embodied.telemetry.boards import Histogram, TensorBoard
from rlinf_embodied.telemetry.metrics import MetricsWriter, Rate, wilson


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
    write_mp4(tmp_path / "videos" / "a--seed=7--success=0.mp4", [np.full((64, 64, 3), k, np.uint8) for k in range(120)])
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
        assert (film.step, image.n_frames, image.info["duration"]) == (0, 60, 100)  # every second frame


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
