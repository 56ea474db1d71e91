"""Writes LeRobot datasets of format v3, without the lerobot package; lerobot.py describes their files."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf_embodied.data.lerobot import PATHS, LeRobotEpisode
from rlinf_embodied.data.recorded import ACTION, IMAGES, STATE
from rlinf_embodied.data.statistics import combine, image_statistics, vector_statistics
from rlinf_embodied.data.video import write_video
from rlinf_embodied.errors import DataError

_ROW_GROUP = 64  # frames per row group of a table with images
_TASK = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
_NUMBER = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
_TASKS_BY_WORDS = {  # pandas' metadata of a table whose index is the column "task", which the lerobot package expects
    "index_columns": ["task"],
    "column_indexes": [_TASK | {"name": None, "field_name": None}],
    "columns": [_NUMBER | {"metadata": None}, _TASK],
}


def write_dataset(folder: Path, episodes: Sequence[LeRobotEpisode], fps: int, robot: str, video: bool = False) -> None:
    """Writes a dataset folder: one data file, and one video per camera.

    All episodes have the same cameras and sizes.  Images are PNG in the table (exact), or videos (smaller, not exact).

    Raises:
        DataError: there are no episodes, or the folder already holds a dataset.
    """
    import pyarrow as pa
    import pyarrow.parquet

    if not episodes or (folder / "meta").exists():
        raise DataError(f"a dataset cannot be written to {folder}: give episodes and a folder that holds none yet")
    tasks = sorted({episode.task for episode in episodes})
    frames = _frames(episodes, tasks, fps)
    images = {IMAGES + name: [e.images[name] for e in episodes] for name in episodes[0].images}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # Hugging Face's Image feature
    filmed, stored = (images, {}) if video else ({}, images)
    image_columns = {
        name: pa.array([{"bytes": _png(frame)} for part in parts for frame in part], kind)
        for name, parts in stored.items()
    }
    entries = _entries(episodes, fps, tuple(filmed))
    of_tasks = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks)})
    tables = {
        PATHS["data_path"].format(chunk_index=0, file_index=0): pa.table(
            {name: pa.array(list(values)) for name, values in frames.items()} | image_columns
        ),
        "meta/episodes/chunk-000/file-000.parquet": pa.Table.from_pylist(entries),
        "meta/tasks.parquet": of_tasks.replace_schema_metadata({"pandas": json.dumps(_TASKS_BY_WORDS)}),
    }
    for name, table in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, folder / name, row_group_size=_ROW_GROUP if image_columns else None)
    for name, parts in filmed.items():
        path = PATHS["video_path"].format(video_key=name, chunk_index=0, file_index=0)
        write_video(folder / path, (frame for part in parts for frame in part), fps, {"crf": "10", "g": "2"})
    ends = np.cumsum([len(episode) for episode in episodes])[:-1]
    statistics = {name: combine(map(vector_statistics, np.split(values, ends))) for name, values in frames.items()}
    statistics |= {name: combine(map(image_statistics, parts)) for name, parts in images.items()}
    stats = {name: {kind: value.tolist() for kind, value in part.items()} for name, part in statistics.items()}
    for name, content in (("stats", stats), ("info", _info(episodes, fps, robot, video, len(tasks)))):
        (folder / f"meta/{name}.json").write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def _frames(episodes: Sequence[LeRobotEpisode], tasks: Sequence[str], fps: int) -> dict[str, np.ndarray]:
    """Returns the columns of the data file except images, with an entry per frame."""
    lengths = [len(episode) for episode in episodes]
    steps = np.concatenate([np.arange(length) for length in lengths])
    return {
        ACTION: np.concatenate([episode.actions for episode in episodes]),
        STATE: np.concatenate([episode.state for episode in episodes]),
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.repeat(np.arange(len(episodes)), lengths),
        "index": np.arange(len(steps)),
        "task_index": np.repeat([tasks.index(episode.task) for episode in episodes], lengths),
    }


def _entries(episodes: Sequence[LeRobotEpisode], fps: int, filmed: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the entries of meta/episodes, one per episode."""
    entries, first = [], 0
    for e, episode in enumerate(episodes):
        last = first + len(episode)
        entry: dict[str, Any] = {"episode_index": e, "tasks": [episode.task], "length": len(episode)}
        entry |= {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": first, "dataset_to_index": last}
        times = {"chunk_index": 0, "file_index": 0, "from_timestamp": first / fps, "to_timestamp": last / fps}
        entry |= {f"videos/{camera}/{name}": value for camera in filmed for name, value in times.items()}
        entries.append(entry | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        first = last
    return entries


def _info(episodes: Sequence[LeRobotEpisode], fps: int, robot: str, video: bool, num_tasks: int) -> dict[str, Any]:
    first = episodes[0]
    sizes = {ACTION: first.actions.shape[1], STATE: first.state.shape[1], "timestamp": 1}
    features = {name: {"dtype": "float32", "shape": [int(size)], "names": None} for name, size in sizes.items()}
    for name, prefix in ((ACTION, "action"), (STATE, "state")):  # LeRobot's viewer labels its curves by them
        features[name]["names"] = [f"{prefix}_{k}" for k in range(int(sizes[name]))]
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    for camera, frames in first.images.items():
        shape, names = [int(size) for size in frames.shape[1:]], ["height", "width", "channels"]
        features[IMAGES + camera] = {"dtype": "video" if video else "image", "shape": shape, "names": names}
    return {
        "codebase_version": "v3.0",
        "robot_type": robot,
        "total_episodes": len(episodes),
        "total_frames": sum(len(episode) for episode in episodes),
        "total_tasks": num_tasks,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": PATHS["data_path"],
        "video_path": PATHS["video_path"] if video else None,
        "features": features,
    }


def _png(frame: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return buffer.getvalue()
