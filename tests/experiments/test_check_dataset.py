"""Planted faults in a dataset are found and named; clean datasets, also LeRobot's own, raise no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.check_dataset import DatasetCheckConfig, check, find_faults
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.data.recorded import ACTION
from rlinf_embodied.embodied.sources import open_dataset

GOLDEN = Path(__file__).parents[1] / "oracles/lerobot/datasets"
REAL = next((p / "shared/data/real_episodes" for p in Path(__file__).parents if (p / "shared/data").exists()), None)
Episodes = list[LeRobotEpisode]
FPS = 10


def recorded(relative: bool = False) -> Episodes:
    """Six joints in degrees, each on a curve; an action is the joints, or their change, one frame later."""
    episodes, drawn = [], np.random.default_rng(0)
    for number in range(4):
        time = np.arange(42)[:, None] / FPS
        speed, phase = drawn.uniform(1, 4, 6), drawn.uniform(0, 6, 6)
        joints = (90 * np.sin(speed * time + phase) + drawn.normal(0, 0.2, (42, 6))).astype(np.float32)
        actions = joints[1:] - joints[:-1] if relative else joints[1:]
        images = np.full((40, 16, 16, 3), 60, np.uint8)
        images[np.arange(40), (np.arange(40) * 5) % 13, :, number % 3] = 250
        task = ("move", "turn")[number % 2]
        episodes.append(LeRobotEpisode(task, actions[:40], joints[:40], {"front": images}))
    return episodes


def changed(number: int, **changes: Callable[[np.ndarray], np.ndarray]) -> Callable[[Episodes], Episodes]:
    def plant(episodes: Episodes) -> Episodes:
        e = episodes[number]
        parts = {name: change(getattr(e, name)) for name, change in changes.items() if name != "front"}
        images = {"front": changes["front"](e.images["front"])} if "front" in changes else e.images
        return [replace(e, **parts, images=images) if k == number else other for k, other in enumerate(episodes)]

    return plant


def everywhere(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Episodes], Episodes]:
    return lambda episodes: [replace(e, actions=change(e.actions)) for e in episodes]


def at(row: int, value: float, entry: int = 2) -> Callable[[np.ndarray], np.ndarray]:
    def put(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[row, entry] = value
        return values

    return put


def twice(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values[:20], values[19:-1]])


def frozen(images: np.ndarray) -> np.ndarray:
    return np.concatenate([images[:10], np.repeat(images[10:11], 15, 0), images[25:]])


def late(actions: np.ndarray) -> np.ndarray:
    return np.concatenate([actions[:1]] * 4 + [actions[:-4]])


BEFORE = {  # what is found, by how episodes are changed before they are written
    "not finite: episode 2, frame 7, action[2] (action_2): 1 values": changed(2, actions=at(7, np.nan)),
    "other units: episode 1, observation.state: its values are 0.01": changed(1, state=lambda x: x * np.pi / 180),
    "duplicate episode: episode 3: its 40 frames equal those of episode 0": lambda e: [*e[:3], e[0]],
    "duplicate frames: episode 1, frame 20": changed(1, actions=twice, state=twice, front=twice),
    "static images: episode 2, frame 10, observation.images.front: 1 episodes; here 15": changed(2, front=frozen),
    "another scene: episode 1, frame 39, observation.images.front": changed(
        1, front=lambda x: np.concatenate([x[:-1], 255 - x[-1:]])
    ),
    "images of one colour: episode 0, observation.images.front: 1 episodes": changed(0, front=np.zeros_like),
    "constant state: episode 1, observation.state: the same in 40": changed(1, state=lambda x: x * 0 + x[:1]),
    "late actions: all episodes, action: they follow the state of 3 frames": everywhere(late),
    "late actions: episode 3, action: -3 frames": changed(3, actions=late),
    "action columns swapped: action[1] (action_1) and action[4]": everywhere(lambda a: a[:, [0, 4, 2, 3, 1, 5]]),
    "action with the other sign: action[5]": everywhere(lambda a: a * [1, 1, 1, 1, 1, -1]),
    "actions in other units: action: 0.0175 times": everywhere(lambda a: a * np.pi / 180),
    "other control mode: episode 2, action: relative": lambda e: [*e[:2], recorded(relative=True)[2], e[3]],
    "task without words: episode 1, frame 0": lambda e: [e[0], replace(e[1], task=" "), *e[2:]],
    "short episode: episode 3: 3 frames": changed(
        3, actions=lambda x: x[:3], state=lambda x: x[:3], front=lambda x: x[:3]
    ),
}


def rewrite(name: str, change: Callable[[list], object]) -> Callable[[Path], None]:
    """Changes a column of the table of frames."""

    def plant(folder: Path) -> None:
        path = folder / "data/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        values = table[name].to_pylist()
        change(values)
        pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values, table[name].type)), path)

    return plant


def described(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / "meta" / file
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return plant


def without_last_episode(folder: Path) -> None:
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 3), path)


def without_timestamps(folder: Path) -> None:
    described("info.json", lambda info: info["features"].pop("timestamp"))(folder)
    path = folder / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns("timestamp"), path)


def shortened(folder: Path) -> None:
    path = folder / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 150), path)


AFTER = {  # by how the files are changed
    "wrong frame rate: episode 0, frame 0, timestamp: 10 frames": described("info.json", lambda i: i.update(fps=30)),
    "wrong timestamps: episode 0, frame 12, timestamp": rewrite("timestamp", lambda t: t.__setitem__(12, 1.23)),
    "unknown task: episode 0, frame 5, task_index: 7": rewrite("task_index", lambda t: t.__setitem__(5, 7)),
    "wrong numbers: episode 1, frame 3, index": rewrite("index", lambda x: x.__setitem__(43, 9)),
    "wrong total: meta/info.json, total_episodes: 4": without_last_episode,
    "frames cannot be read": shortened,
    "missing columns: meta/info.json, features: timestamp": without_timestamps,
    "wrong statistics: meta/stats.json, action: mean[3]": described(
        "stats.json", lambda s: s["action"]["mean"].__setitem__(3, 500.0)
    ),
    "statistics of another robot: meta/stats.json, action: min has the shape [5]": described(
        "stats.json", lambda s: s["action"]["min"].pop()
    ),
}


def write(folder: Path, episodes: Episodes, video: bool = False) -> Path:
    write_dataset(folder, episodes, FPS, "arm", video)
    return folder


def found_in(folder: Path) -> list[str]:
    return [str(fault) for fault in find_faults(open_dataset(folder, "data"), folder)]


@pytest.mark.parametrize("name", BEFORE)
def test_a_planted_fault_is_the_only_finding(name: str, tmp_path: Path) -> None:
    (finding,) = found_in(write(tmp_path / "set", BEFORE[name](recorded())))
    assert finding.startswith(name)


@pytest.mark.parametrize("name", AFTER)
def test_a_planted_fault_of_the_files_is_found(name: str, tmp_path: Path) -> None:
    AFTER[name](write(tmp_path / "set", recorded()))
    found = [line for line in found_in(tmp_path / "set") if line.startswith(name)]
    assert len(found) == 1


def test_missing_and_short_videos_are_found(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", recorded(), video=True)
    assert found_in(folder) == []
    video = folder / "videos/observation.images.front/chunk-000/file-000.mp4"
    other = write(tmp_path / "short", recorded()[:2], video=True) / video.relative_to(folder)
    video.write_bytes(other.read_bytes())
    found = found_in(folder)
    assert [line.split(", ")[0] for line in found] == [f"images cannot be read: episode {k}" for k in (2, 3)]
    assert "there are 0 of" in found[0]
    video.unlink()
    assert len(found_in(folder)) == 4


def test_clean_datasets_raise_no_alarm_and_the_command_says_so(tmp_path: Path, capsys) -> None:
    places = [write(tmp_path / "a", recorded()), write(tmp_path / "b", recorded(relative=True)), GOLDEN / "images"]
    assert check(DatasetCheckConfig(data=",".join(map(str, [*places, GOLDEN / "video"])))) == 0
    assert capsys.readouterr().out.endswith("nothing found\n")


@pytest.mark.skipif(REAL is None, reason="shared/data is in no folder above the project's")
def test_what_is_found_in_real_episodes(capsys) -> None:
    assert REAL is not None
    assert check(DatasetCheckConfig(data=f"{REAL / 'bridge_lerobot'},{REAL / 'umi_lerobot'}")) == 0
    found = {name: found_in(REAL / name) for name in ("fractal_lerobot", "bridge_rlds")}
    assert [line.split(":")[0] for line in found["bridge_rlds"]] == ["images of one colour"]
    expected = {
        "quaternion changes its sign",
        "wrong statistics",
        "another scene",
    }  # numbers of the whole dataset; std 0 of images
    assert {line.split(":")[0] for line in found["fractal_lerobot"]} == expected
    assert ACTION not in " ".join(found["fractal_lerobot"])
