"""LeRobot folders: items equal those of LeRobot's own library, and what cannot be read is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rlinf_embodied.data.lerobot import LeRobotDataset, LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.errors import ConfigError, DataError

NAMED = "warm_start.demonstrations"
ORACLE = Path(__file__).parents[1] / "oracles/lerobot/datasets"
GOLDEN = json.loads((ORACLE / "golden.json").read_text())["datasets"]


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
    assert (dataset.num_episodes, len(dataset), dataset.fps, set(dataset.tasks)) == (3, 22, 20, {"move", "turn"})
    assert list(dataset.cameras) == ["front", "wrist"]
    assert (dataset.size("action"), dataset.states, dataset.size("x")) == (3, {"observation.state": 4}, None)
    require_same(dataset, exact=not (folder / "videos").exists())
    found = dataset.images("wrist", [21, 3, 21, 11])  # in any order, of several episodes, some twice
    brightness = [shown.mean() for shown in found]
    assert brightness == pytest.approx([200, 130, 200, 100], abs=3)


def require_same(dataset: LeRobotDataset, exact: bool) -> None:
    for number, expected in enumerate(EPISODES):
        frames = np.array(dataset.frames(number))
        assert dataset.task(frames[0]) == expected.task
        assert np.array_equal(dataset.columns["action"][frames], expected.actions)
        assert np.array_equal(dataset.state[frames], expected.state)
        for name, images in expected.images.items():
            off = np.abs(dataset.images(name, frames).astype(int) - images.astype(int)).max()
            assert off == 0 if exact else off <= 3


# ---------------------------------------------------------------------------------------------- LeRobot's own library
@pytest.mark.parametrize("name", GOLDEN)
def test_items_and_statistics_equal_those_of_lerobot(name: str) -> None:
    golden, tensors = GOLDEN[name], load_file(ORACLE / f"{name}_golden/golden.safetensors")
    dataset, plain = (LeRobotDataset(ORACLE / name, NAMED, deltas) for deltas in (golden["delta_timestamps"], None))
    assert (len(dataset), dataset.fps) == (golden["total_frames"], golden["fps"])
    for expected in golden["items"]:
        item, without = dataset[expected["index"]], plain[expected["index"]]
        assert sorted(item) == expected["keys_with_delta"]
        assert sorted(without) == expected["keys_plain"]
        assert {key: list(without[key].shape) for key in expected["plain_shapes"]} == expected["plain_shapes"]
        assert item["task"] == expected["task"]
        for key, shape in expected["shapes"].items():
            found, where = item[key], f"{expected['index']}.{key}"
            assert (list(found.shape), str(found.dtype)) == (shape, expected["dtypes"][key])
            if where in tensors:
                whole = tensors[where].dtype == torch.uint8
                assert torch.equal((found * 255).round().to(torch.uint8) if whole else found, tensors[where])
            if f"{where}.every7th" in tensors:
                assert torch.equal(found[..., ::7, ::7], tensors[f"{where}.every7th"])
    for key, expected in golden["meta_stats"].items():
        for kind, value in expected.items():
            assert np.allclose(dataset.measured[key][kind], value)
            if "images" not in key or name == "images":  # a video is not what was measured
                assert np.allclose(dataset.compute_statistics(key)[kind], value, rtol=1e-6, atol=3e-4), (key, kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_statistics_of_relative_actions_equal_those_of_lerobot(name: str) -> None:
    found = LeRobotDataset(ORACLE / name).relative_action_statistics(8, [True] * 5 + [False])
    for kind, value in GOLDEN[name]["relative_action_stats_chunk8_exclude_gripper"].items():
        assert np.allclose(found[kind], value, rtol=1e-6, atol=1e-4), kind


def test_some_episodes_are_read_as_if_there_were_no_others() -> None:
    deltas = {"action": GOLDEN["video"]["delta_timestamps"]["action"]}
    dataset = LeRobotDataset(ORACLE / "video", NAMED, deltas, episodes=[1])
    tensors = load_file(ORACLE / "video_golden/golden.safetensors")
    assert (len(dataset), dataset[0]["index"]) == (20, 20)
    for frame in (0, 18):
        assert torch.equal(dataset[frame]["action"], tensors[f"episode1_only.{frame}.action"])
    assert torch.equal(dataset[18]["action_is_pad"], tensors["episode1_only.18.action_is_pad"])
    with pytest.raises(DataError, match=r"has no episodes \[7\], but 2"):
        LeRobotDataset(ORACLE / "video", NAMED, episodes=[1, 7])
    for deltas, words in (({"x": [0.0]}, "has no feature 'x'"), ({"action": [0.05]}, r"has \[0.05\] for action: its")):
        with pytest.raises(DataError, match=words):
            LeRobotDataset(ORACLE / "video", NAMED, deltas)


def test_files_may_be_many_and_episodes_in_any_order(folder: Path) -> None:
    """Splits the files by hand: the first episode alone, in the second file; the others in the first."""
    data, meta = folder / "data/chunk-000", folder / "meta/episodes/chunk-000/file-000.parquet"
    table, entries = pq.read_table(data / "file-000.parquet"), pq.read_table(meta).to_pylist()
    pq.write_table(table.slice(7), data / "file-000.parquet")
    pq.write_table(table.slice(0, 7), data / "file-001.parquet")
    entries[0]["data/file_index"] = 1
    pq.write_table(pa.Table.from_pylist(entries[::-1]), meta)
    require_same(LeRobotDataset(folder, NAMED), exact=not (folder / "videos").exists())


def test_version_2_has_a_file_per_episode(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    info, stats = {}, []
    for number, part in enumerate(EPISODES):
        write_dataset(tmp_path / str(number), [part], fps=20, robot="panda", video=True)
        table = pq.read_table(tmp_path / str(number) / "data/chunk-000/file-000.parquet")
        task = pa.array([int(part.task == "turn")] * len(part))
        table = table.set_column(table.column_names.index("task_index"), "task_index", task)
        table = table.set_column(
            table.column_names.index("episode_index"), "episode_index", pa.array([number] * len(part))
        )
        place = f"chunk-00{number // 2}"
        (tmp_path / "data" / place).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / "data" / place / f"episode_{number:06d}.parquet")
        for camera in ("observation.images.front", "observation.images.wrist"):
            video = tmp_path / "videos" / place / camera / f"episode_{number:06d}.mp4"
            video.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tmp_path / str(number) / "videos" / camera / "chunk-000/file-000.mp4", video)
        info = json.loads((tmp_path / str(number) / "meta/info.json").read_text())
        stats.append({"episode_index": number, "stats": json.loads(read_stats(tmp_path / str(number)))})
    paths = {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (tmp_path / "meta/info.json").write_text(json.dumps(info | paths | {"codebase_version": "v2.1", "chunks_size": 2}))
    for name, lines in (
        ("tasks", [{"task_index": 0, "task": "move"}, {"task_index": 1, "task": "turn"}]),
        ("episodes", [{"episode_index": k, "tasks": [e.task], "length": len(e)} for k, e in enumerate(EPISODES)]),
        ("episodes_stats", stats),
    ):
        (tmp_path / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = LeRobotDataset(tmp_path, NAMED)
    require_same(dataset, exact=False)
    for kind, value in dataset.compute_statistics("action").items():
        assert np.allclose(dataset.statistics(["action"])["action"][kind], value)


def read_stats(folder: Path) -> str:
    return (folder / "meta/stats.json").read_text()


def test_images_of_other_cameras_are_not_read(folder: Path) -> None:
    for video in folder.glob("videos/observation.images.front/**/*.mp4"):
        video.write_bytes(b"damaged")
    assert LeRobotDataset(folder, NAMED).images("wrist", [0]).shape == (1, 32, 32, 3)


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
    change_info(folder, codebase_version="v1.6")
    with pytest.raises(DataError, match=r"codebase_version is 'v1.6', and v2 and v3 are read: convert it"):
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
        _ = dataset.columns
    data.write_bytes(whole)
    for video in (folder / "videos").rglob("*.mp4"):
        video.unlink()
        camera = video.parts[-3].removeprefix("observation.images.")
        with pytest.raises(DataError, match=r"file-000.mp4 cannot be read"):
            dataset.images(camera, [0])
    for path in (folder / "meta/episodes").rglob("*.parquet"):
        path.unlink()
    with pytest.raises(DataError, match=r"holds no episode: record some"):
        LeRobotDataset(folder, NAMED)


def test_a_class_of_another_format_is_named_before_the_path() -> None:
    place = f"rlinf_embodied.data.lerobot.LeRobotDataset@{ORACLE / 'images'}"
    assert len(open_dataset(place, "data")) == len(open_dataset(ORACLE / "images", "data")) == 40
    with pytest.raises(ConfigError, match=r"data is 'rlinf_embodied.data.lerobot.Zarr', but"):
        open_dataset("rlinf_embodied.data.lerobot.Zarr@/data", "data")
