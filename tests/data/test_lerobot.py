"""LeRobot folders: what is written is read back, whole or in parts, and what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlinf_embodied.data.lerobot import LeRobotDataset, LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import image_statistics, statistics, write_dataset
from rlinf_embodied.errors import DataError

NAMED = "warm_start.demonstrations"


def episode(length: int, seed: int, task: str = "move", size: int = 32) -> LeRobotEpisode:
    """Smooth images (videos keep them nearly), whose brightness counts the frames."""
    drawn = np.random.default_rng(seed)
    brightness = (40 + 10 * np.arange(length, dtype=np.uint8))[:, None, None, None]
    return LeRobotEpisode(
        task=task,
        actions=drawn.uniform(-1, 1, (length, 3)).astype(np.float32),
        state=drawn.normal(size=(length, 4)).astype(np.float32),
        images={
            name: np.broadcast_to(brightness + offset, (length, size, size, 3)).astype(np.uint8).copy()
            for name, offset in (("front", 0), ("wrist", 60))
        },
    )


EPISODES = [episode(7, 0), episode(4, 1, "turn"), episode(11, 2)]


@pytest.fixture(params=[False, True], ids=["png", "video"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_dataset(tmp_path / "set", EPISODES, fps=20, robot="panda", video=request.param)
    return tmp_path / "set"


def test_what_is_written_is_read_back(folder: Path) -> None:
    dataset = LeRobotDataset(folder, NAMED)
    assert (len(dataset), dataset.fps, set(dataset.tasks)) == (3, 20, {"move", "turn"})
    assert dataset.cameras == ("front", "wrist")
    assert (dataset.size("action"), dataset.size("observation.state"), dataset.size("x")) == (3, 4, None)
    exact = not (folder / "videos").exists()
    for number, read in zip([2, 0, 1], dataset.read([2, 0, 1]), strict=True):
        expected = EPISODES[number]
        assert read.task == expected.task
        assert np.array_equal(read.actions, expected.actions)
        assert np.array_equal(read.state, expected.state)
        for name, frames in expected.images.items():
            off = np.abs(read.images[name].astype(int) - frames.astype(int)).max()
            assert off == 0 if exact else off <= 3


def test_only_those_images_are_kept_that_are_asked_for(folder: Path) -> None:
    (read,) = LeRobotDataset(folder, NAMED).read([2], slice(None, None, 5))
    assert len(read) == 11
    expected = EPISODES[2].images["wrist"][[0, 5, 10]].astype(int)
    assert np.abs(read.images["wrist"].astype(int) - expected).max() <= 3


def test_images_of_other_cameras_are_not_read(folder: Path) -> None:
    for video in folder.glob("videos/observation.images.front/**/*.mp4"):
        video.write_bytes(b"damaged")
    (read,) = LeRobotDataset(folder, NAMED).read([0], cameras=["wrist"])
    assert list(read.images) == ["wrist"]


def test_the_axes_of_images_are_known_by_their_names(folder: Path) -> None:
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    assert features["action"]["names"] == [f"action_{k}" for k in range(features["action"]["shape"][0])]
    features["observation.images.front"] |= {"shape": [3, 24, 48], "names": ["channels", "height", "width"]}
    change_info(folder, features=features)
    dataset = LeRobotDataset(folder, NAMED)
    assert (dataset.image_size("front"), dataset.image_size("wrist")) == ((24, 48), (32, 32))


def test_a_dataset_is_not_written_over_another(folder: Path) -> None:
    with pytest.raises(DataError, match="a folder that holds none yet"):
        write_dataset(folder, EPISODES, fps=20, robot="panda")
    with pytest.raises(DataError, match="give episodes"):
        write_dataset(folder / "other", [], fps=20, robot="panda")


def change_info(folder: Path, **changes: object) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_no_dataset_is_named_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"warm_start.demonstrations is .*/nothing'.*info.json cannot be read"):
        LeRobotDataset(tmp_path / "nothing", NAMED)
    change_info(folder, codebase_version="v2.1")
    with pytest.raises(DataError, match=r"codebase_version is 'v2.1' and v3 is needed: convert it"):
        LeRobotDataset(folder, NAMED)
    (folder / "meta/info.json").write_text("{")
    with pytest.raises(DataError, match=r"info.json cannot be read .*give the folder of a LeRobot dataset"):
        LeRobotDataset(folder, NAMED)


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    data = folder / "data/chunk-000/file-000.parquet"
    dataset = LeRobotDataset(folder, NAMED)
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(DataError, match=r"file-000.parquet cannot be read .*copy the dataset anew"):
        list(dataset.read([0]))
    data.write_bytes(whole)
    for video in (folder / "videos").rglob("*.mp4"):
        video.unlink()
        with pytest.raises(DataError, match=r"file-000.mp4 cannot be read"):
            list(dataset.read([0]))
    for path in (folder / "meta/episodes").rglob("*.parquet"):
        path.unlink()
    with pytest.raises(DataError, match=r"holds no episode: record some"):
        LeRobotDataset(folder, NAMED)


def test_vectors_numbers_and_images_have_numpys_statistics_in_lerobots_shapes() -> None:
    drawn = np.random.default_rng(0)
    vectors, numbers = drawn.normal(size=(7, 3)).astype(np.float32), np.arange(7)
    images = drawn.integers(0, 256, (7, 4, 5, 3), dtype=np.uint8)
    for found, expected, axes, shape in (
        (statistics(vectors), vectors, 0, (3,)),
        (statistics(numbers), numbers[:, None], 0, (1,)),
        (image_statistics([images[:2], images[2:]]), images / 255, (0, 1, 2), (3, 1, 1)),
    ):
        assert found["count"] == [7]
        for name in ("min", "max", "mean", "std"):
            wanted = getattr(np, name)(expected.astype(np.float64), axis=axes).reshape(shape)
            assert np.allclose(found[name], wanted, atol=1e-9)
            assert np.array(found[name]).shape == shape
