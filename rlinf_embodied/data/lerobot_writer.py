"""Writes LeRobot datasets of format v3, without the lerobot package; lerobot.py says what lies where."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from rlinf_embodied.data.lerobot import ACTION, IMAGES, PATHS, STATE, LeRobotEpisode, parquet_library
from rlinf_embodied.errors import DataError

Statistics = dict[str, list]  # "min", "max", "mean", "std" over frames, and their "count"
_VERSION = "v3.0"
_INDICES = ("frame_index", "episode_index", "index", "task_index")
_TASKS_BY_WORDS = {  # what pandas writes for a table whose index is the column "task", as the lerobot package expects
    "index_columns": ["task"],
    "column_indexes": [
        {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    ],
    "columns": [
        {
            "name": "task_index",
            "field_name": "task_index",
            "pandas_type": "int64",
            "numpy_type": "int64",
            "metadata": None,
        },
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ],
}


def write_dataset(folder: Path, episodes: Sequence[LeRobotEpisode], fps: int, robot: str, video: bool = False) -> None:
    """Writes a dataset folder: one data file, and one video per camera.

    Args:
        folder: to be made; must not hold a dataset yet.
        episodes: at least one; all have the same cameras and sizes.
        fps: frames per second.
        robot: its name.
        video: images as videos (smaller, not exact) instead of PNG in the table (exact).

    Raises:
        DataError: no episodes, a dataset that is there already, or pyarrow is not installed.
    """
    parquet = parquet_library()
    import pyarrow as pa

    if not episodes or (folder / "meta").exists():
        raise DataError(f"a dataset cannot be written to {folder}: give episodes and a folder that holds none yet")
    tasks = sorted({episode.task for episode in episodes})
    filmed = tuple(episodes[0].images) if video else ()
    starts = np.cumsum([0, *(len(episode) for episode in episodes)])
    columns = _columns(pa, episodes, tasks, fps) | ({} if video else _images(pa, episodes))
    entries = [_entry(e, episode, starts, fps, filmed) for e, episode in enumerate(episodes)]
    of_episodes = {name: pa.array([entry[name] for entry in entries]) for name in entries[0]}
    of_tasks = {"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks)}
    tables = {
        PATHS["data_path"].format(chunk_index=0, file_index=0): pa.table(columns),
        "meta/episodes/chunk-000/file-000.parquet": pa.table(of_episodes),
        "meta/tasks.parquet": pa.table(of_tasks).replace_schema_metadata({"pandas": json.dumps(_TASKS_BY_WORDS)}),
    }
    for name, table in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, folder / name)
    for camera in filmed:
        path = PATHS["video_path"].format(video_key=IMAGES + camera, chunk_index=0, file_index=0)
        _write_video(folder / path, (frame for episode in episodes for frame in episode.images[camera]), fps)
    found = _statistics(episodes, columns)
    (folder / "meta/stats.json").write_text(json.dumps(found, indent=4) + "\n", encoding="utf-8")
    info = _info(episodes, fps, robot, video, tasks)
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4) + "\n", encoding="utf-8")


def _columns(pa: Any, episodes: Sequence[LeRobotEpisode], tasks: Sequence[str], fps: int) -> dict[str, Any]:
    """Columns of the data file, one entry per frame, without images."""
    frames = [(e, k) for e, episode in enumerate(episodes) for k in range(len(episode))]
    numbers = {
        "frame_index": [k for _, k in frames],
        "episode_index": [e for e, _ in frames],
        "index": list(range(len(frames))),
        "task_index": [tasks.index(episodes[e].task) for e, _ in frames],
    }
    vectors = {ACTION: [e.actions for e in episodes], STATE: [e.state for e in episodes]}
    floats = pa.list_(pa.float32())
    return {
        **{name: pa.array([row.tolist() for part in parts for row in part], floats) for name, parts in vectors.items()},
        "timestamp": pa.array([k / fps for _, k in frames], pa.float32()),
        **{name: pa.array(values, pa.int64()) for name, values in numbers.items()},
    }


def _images(pa: Any, episodes: Sequence[LeRobotEpisode]) -> dict[str, Any]:
    """Columns of images as PNG, in the form of Hugging Face's Image feature."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {}
    for camera in episodes[0].images:
        shown = [{"bytes": _png(frame), "path": None} for e in episodes for frame in e.images[camera]]
        columns[IMAGES + camera] = pa.array(shown, kind)
    return columns


def _entry(e: int, episode: LeRobotEpisode, starts: np.ndarray, fps: int, filmed: Sequence[str]) -> dict[str, Any]:
    """What meta/episodes says of an episode."""
    first, last = int(starts[e]), int(starts[e + 1])
    entry: dict[str, Any] = {"episode_index": e, "tasks": [episode.task], "length": len(episode)}
    entry |= {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": first, "dataset_to_index": last}
    for camera in filmed:
        times = {"chunk_index": 0, "file_index": 0, "from_timestamp": first / fps, "to_timestamp": last / fps}
        entry |= {f"videos/{IMAGES}{camera}/{name}": value for name, value in times.items()}
    return entry | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}


def _statistics(episodes: Sequence[LeRobotEpisode], columns: Mapping[str, Any]) -> dict[str, Statistics]:
    """Statistics of all frames by feature."""
    numbers = {name: np.asarray(columns[name]) for name in ("timestamp", *_INDICES)}
    vectors = {ACTION: [e.actions for e in episodes], STATE: [e.state for e in episodes]}
    columns = {name: np.concatenate(parts) for name, parts in vectors.items()} | numbers
    images = {camera: [e.images[camera] for e in episodes] for camera in episodes[0].images}
    return {name: statistics(values) for name, values in columns.items()} | {
        IMAGES + camera: image_statistics(parts) for camera, parts in images.items()
    }


def _info(
    episodes: Sequence[LeRobotEpisode], fps: int, robot: str, video: bool, tasks: Sequence[str]
) -> dict[str, Any]:
    first = episodes[0]
    vector = lambda size: {"dtype": "float32", "shape": [int(size)], "names": None}  # noqa: E731
    features: dict[str, Any] = {ACTION: vector(first.actions.shape[1]), STATE: vector(first.state.shape[1])}
    for camera, frames in first.images.items():
        shape = [int(size) for size in frames.shape[1:]]
        names = ["height", "width", "channels"]
        features[IMAGES + camera] = {"dtype": "video" if video else "image", "shape": shape, "names": names}
    features |= {"timestamp": vector(1)} | {name: {"dtype": "int64", "shape": [1], "names": None} for name in _INDICES}
    return {
        "codebase_version": _VERSION,
        "robot_type": robot,
        "total_episodes": len(episodes),
        "total_frames": sum(len(episode) for episode in episodes),
        "total_tasks": len(tasks),
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


def _write_video(path: Path, frames: Iterator[np.ndarray], fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "10", "g": "2"})
        stream.pix_fmt = "yuv420p"
        for number, image in enumerate(frames):
            if number == 0:
                stream.height, stream.width = image.shape[:2]
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


# ----------------------------------------------------------------------------------------------------------- statistics
def statistics(values: np.ndarray) -> Statistics:
    """Returns the statistics of vectors [T, D] or numbers [T] over frames, each [D]."""
    columns = values.astype(np.float64).reshape(len(values), -1)
    found = {"min": columns.min(0), "max": columns.max(0), "mean": columns.mean(0), "std": columns.std(0)}
    return {name: column.tolist() for name, column in found.items()} | {"count": [len(values)]}


def image_statistics(parts: Sequence[np.ndarray]) -> Statistics:
    """Returns the statistics [3, 1, 1] of the colours, as shares of 255, in images uint8 [T, height, width, 3]."""
    # from counts of values: a copy in floats is eight times as large
    colours = [[np.bincount(images[..., k].ravel(), minlength=256) for k in range(3)] for images in parts]
    counts, values = np.sum(colours, 0).astype(np.float64), np.arange(256) / 255.0
    mean = counts @ values / counts.sum(1)
    shown = [values[row > 0] for row in counts]
    found = {
        "min": np.array([row.min() for row in shown]),
        "max": np.array([row.max() for row in shown]),
        "mean": mean,
        "std": np.sqrt(np.maximum(counts @ values**2 / counts.sum(1) - mean**2, 0.0)),
    }
    shaped = {name: column[:, None, None].tolist() for name, column in found.items()}
    return shaped | {"count": [sum(len(images) for images in parts)]}
