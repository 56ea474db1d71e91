"""LeRobot datasets of format v3, read without the lerobot package; lerobot_writer.py writes them.

meta/info.json                                      features {name: {dtype, shape}}, fps, templates of the paths below
meta/tasks.parquet                                  task_index, and the task in words
meta/stats.json                                     min, max, mean, std of each feature (lerobot_writer.py)
meta/episodes/chunk-000/file-000.parquet            per episode: length, which files hold it, seconds within each video
data/chunk-000/file-000.parquet                     per frame: action, observation.state, episode_index, ..., images
videos/<camera>/chunk-000/file-000.mp4              images of many episodes, one after the other
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from PIL import Image

from rlinf_embodied.errors import DataError

ACTION, STATE, IMAGES = "action", "observation.state", "observation.images."
PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


@dataclass(frozen=True, slots=True)
class LeRobotEpisode:
    """One episode: T frames, each with its observation and action."""

    task: str  # in words
    actions: np.ndarray  # float32 [T, A]
    state: np.ndarray  # float32 [T, P]
    images: Mapping[str, np.ndarray]  # by camera, uint8 [T, height, width, 3]

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True)
class LeRobotInfo:
    """What meta/info.json says."""

    fps: float
    num_episodes: int
    features: Mapping[str, Mapping[str, Any]]

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras, without the prefix that all of them have."""
        return tuple(name.removeprefix(IMAGES) for name in self.features if name.startswith(IMAGES))

    def size(self, name: str) -> int | None:
        """Returns the number of entries of a vector feature, None without such a feature."""
        shape = self.features.get(name, {}).get("shape")
        return int(shape[0]) if shape and len(shape) == 1 else None

    def image_size(self, camera: str) -> tuple[int, int]:
        """Returns height and width of a camera's images, whose axes the dataset may name in any order."""
        feature = self.features[IMAGES + camera]
        axes = dict(zip(feature.get("names") or ("height", "width", "channels"), feature["shape"], strict=True))
        return int(axes["height"]), int(axes["width"])


class LeRobotDataset:
    """A dataset folder; nothing but its descriptions is read until episodes are asked for."""

    def __init__(self, folder: Path, named: str) -> None:
        """`named`: the config path that gave the folder, for errors.

        Raises:
            DataError: it is no LeRobot v3 folder, holds no episode, or pyarrow is not installed.
        """
        self._parquet = parquet_library()
        self._folder, self._where = folder, f"{named} is {str(folder)!r}"
        described = self._read_info()
        self.info = LeRobotInfo(described["fps"], described["total_episodes"], described["features"])
        self._paths = {key: described.get(key) or path for key, path in PATHS.items()}
        self._tasks = self._read_tasks()
        entries = [row for path in sorted(folder.glob("meta/episodes/*/*.parquet")) for row in self._rows(path)]
        self._episodes = sorted(entries, key=lambda entry: entry["episode_index"])
        if not self._episodes:
            raise DataError(f"{self._where}, but it holds no episode: record some, or give another folder")
        self._tables: dict[Path, Any] = {}

    def __len__(self) -> int:
        """Returns the number of episodes."""
        return len(self._episodes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What its episodes do, in words."""
        return tuple(self._tasks.values())

    def _read_info(self) -> dict:
        path = self._folder / "meta/info.json"
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            version = described["codebase_version"]
            described |= {"fps": float(described["fps"]), "total_episodes": int(described["total_episodes"])}
            described["features"] = dict(described["features"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._where}, but {path} cannot be read ({error!r}): give the folder of a LeRobot dataset"
            ) from error
        if not str(version).startswith("v3"):
            raise DataError(
                f"{self._where}, but its codebase_version is {version!r} and v3 is needed: convert it with "
                "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
            )
        return described

    def _rows(self, path: Path) -> list[dict]:
        try:
            return self._parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(f"{self._where}, but {path} cannot be read ({error}): copy the dataset anew") from error

    def _read_tasks(self) -> dict[int, str]:
        """Tasks by number; their words are pandas' index, whose column has no fixed name."""
        rows = self._rows(self._folder / "meta/tasks.parquet")
        return {row.pop("task_index"): str(next(iter(row.values()))) for row in rows}

    def read(
        self, numbers: Sequence[int], frames: slice = slice(None), cameras: Sequence[str] | None = None
    ) -> Iterator[LeRobotEpisode]:
        """Yields the episodes of these numbers.

        Args:
            numbers: of episodes, from 0.
            frames: those whose images are kept; actions and states are all there.
            cameras: those whose images are read; None: all.

        Raises:
            DataError: a file is missing or damaged, or does not hold what the descriptions promise.
        """
        for number in numbers:
            yield self._read(self._episodes[number], frames, self.info.cameras if cameras is None else cameras)

    def _read(self, entry: dict, frames: slice, cameras: Sequence[str]) -> LeRobotEpisode:
        number = entry["episode_index"]
        table = self._table(entry)
        try:
            own = np.nonzero(np.asarray(table["episode_index"]) == number)[0]
            rows = table.take(own[np.argsort(np.asarray(table["frame_index"])[own], kind="stable")])
            actions, state = (np.asarray(rows[name].to_pylist(), dtype=np.float32) for name in (ACTION, STATE))
            task = self._tasks[rows["task_index"][0].as_py()]
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"{self._where}, but episode {number} has no complete {ACTION}, {STATE} and task ({error!r}): "
                "leave it out"
            ) from error
        if len(actions) != entry["length"]:
            raise DataError(
                f"{self._where}, but episode {number} has {len(actions)} frames where meta/episodes says "
                f"{entry['length']}: copy the dataset anew"
            )
        chosen = range(len(actions))[frames]
        images = {}
        for camera in cameras:
            name = IMAGES + camera
            if self.info.features[name]["dtype"] == "video":
                images[camera] = self._from_video(entry, name, chosen)
            else:
                images[camera] = np.stack([self._image(rows[name][k].as_py()) for k in chosen])
        return LeRobotEpisode(task, actions, state, images)

    def _table(self, entry: dict) -> Any:
        place = {"chunk_index": entry["data/chunk_index"], "file_index": entry["data/file_index"]}
        path = self._folder / self._paths["data_path"].format(**place)
        if path not in self._tables:
            try:
                self._tables = {path: self._parquet.read_table(path)}
            except (OSError, ValueError) as error:
                raise DataError(f"{self._where}, but {path} cannot be read ({error}): copy the dataset anew") from error
        return self._tables[path]

    def _image(self, value: dict) -> np.ndarray:
        """Returns an image that is stored in the table or in a file next to it."""
        source = io.BytesIO(value["bytes"]) if value.get("bytes") else self._folder / value["path"]
        return np.asarray(Image.open(source).convert("RGB"))

    def _from_video(self, entry: dict, name: str, frames: Sequence[int]) -> np.ndarray:
        """Returns frames of an episode: those whose time is nearest, and within half a frame."""
        place = {part: entry[f"videos/{name}/{part}"] for part in ("chunk_index", "file_index")}
        path = self._folder / self._paths["video_path"].format(video_key=name, **place)
        start, fps = float(entry[f"videos/{name}/from_timestamp"]), self.info.fps
        wanted = {round(start * fps) + frame: k for k, frame in enumerate(frames)}
        found: dict[int, np.ndarray] = {}
        try:
            with av.open(str(path)) as container:
                stream = container.streams.video[0]
                container.seek(int(start / (stream.time_base or 1)), stream=stream)
                for frame in container.decode(stream):
                    at = wanted.get(round((frame.time or 0.0) * fps))
                    if at is not None:
                        found[at] = frame.to_ndarray(format="rgb24")
                    if len(found) == len(wanted):
                        break
        except (OSError, ValueError, FFmpegError) as error:
            raise DataError(f"{self._where}, but {path} cannot be read ({error}): copy the dataset anew") from error
        if len(found) != len(wanted):
            raise DataError(
                f"{self._where}, but {path} has {len(found)} of the {len(wanted)} images of episode "
                f"{entry['episode_index']}: copy the dataset anew"
            )
        return np.stack([found[k] for k in range(len(wanted))])


def parquet_library() -> Any:
    """Returns pyarrow.parquet, which only LeRobot datasets need.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "LeRobot datasets are Parquet files, and pyarrow is not installed: run make setup, or pip install pyarrow"
        ) from error
    return pyarrow.parquet
