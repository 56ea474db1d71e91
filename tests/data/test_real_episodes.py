"""Episodes of real robots in ../shared/data/real_episodes: they are read, measured and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.examples import film_strip
from rlinf_embodied.embodied.sources import open_dataset

SHARED = next((p for p in Path(__file__).parents if (p / "shared/data/real_episodes").exists()), None)
pytestmark = pytest.mark.skipif(SHARED is None, reason="shared/data/real_episodes is in no folder above the project's")


@pytest.mark.parametrize(
    ("name", "episodes", "frames", "action_dim", "state_dim", "image"),
    [
        ("bridge_lerobot", 1, 29, 7, 7, (480, 640)),
        ("fractal_lerobot", 1, 37, 7, 8, (256, 320)),
        ("umi_lerobot", 1, 417, None, 8, (224, 224)),
        ("bridge_rlds", 25, 250, 7, 7, (64, 64)),
    ],
)
def test_real_episodes_are_read_and_drawn(tmp_path, name, episodes, frames, action_dim, state_dim, image) -> None:
    assert SHARED is not None
    folder = SHARED / "shared/data/real_episodes" / name
    dataset = open_dataset(folder, "data")
    assert (dataset.num_episodes, len(dataset), dataset.size("action")) == (episodes, frames, action_dim)
    assert dataset.state.shape == (frames, state_dim)
    assert all(dataset.image_size(camera) == image for camera in dataset.cameras)
    assert all(dataset.tasks)
    for feature, theirs in dataset.measured.items():  # those of images were measured before a video was made of them
        if feature not in (*dataset.cameras.values(), "index", "episode_index", "task_index"):
            ours = dataset.compute_statistics(feature)  # an excerpt has other numbers than the whole dataset
            assert all(np.allclose(ours[kind], value, rtol=1e-5, atol=1e-5) for kind, value in theirs.items())
    film_strip.draw_strip(film_strip.Options(data=str(folder), out=str(tmp_path / "strip.png"), num_episodes=1))
    assert (tmp_path / "strip.png").stat().st_size > 10_000
