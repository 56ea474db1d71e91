"""Images of a dataset within a limit of memory: equal to those that are decoded at once, in any order, by threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.lerobot import LeRobotDataset
from rlinf_embodied.errors import DataError

ORACLE = Path(__file__).parents[1] / "oracles/lerobot/datasets"
IMAGE = 64 * 96 * 3  # bytes


@pytest.mark.parametrize("name", ["video", "images"])
def test_images_equal_those_of_the_dataset_and_take_no_more_than_the_limit(name: str, monkeypatch) -> None:
    dataset = LeRobotDataset(ORACLE / name, "data")
    expected, decoded, read = dataset.images("front", range(40)), [], dataset._read_images
    monkeypatch.setattr(dataset, "_read_images", lambda f, rows: decoded.extend(rows) or read(f, rows))
    cache, drawn = FrameCache(10 * IMAGE, num_threads=2), np.random.default_rng(0)
    for _ in range(20):
        frames, ahead = drawn.integers(0, 40, (2, 3)), drawn.integers(0, 40, 4)
        cache.request(dataset, "front", ahead)
        assert np.array_equal(cache.get(dataset, "front", frames), expected[frames])
        assert cache._bytes <= 10 * IMAGE
    whole, before = FrameCache(40 * IMAGE), len(decoded)
    for _ in range(3):
        whole.get(dataset, "front", np.arange(40))
    assert len(decoded) == before + 40  # each once


def test_a_damaged_file_is_an_error_of_those_who_need_it(tmp_path: Path, monkeypatch) -> None:
    dataset, cache = LeRobotDataset(ORACLE / "video", "data"), FrameCache(0)
    assert dataset.columns  # are read before images are
    monkeypatch.setattr(dataset, "_folder", tmp_path)
    cache.request(dataset, "front", [1])
    with pytest.raises(DataError, match=r"file-000.mp4 cannot be read"):
        cache.get(dataset, "front", np.array([1]))
