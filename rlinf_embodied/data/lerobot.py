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
from contextlib import contextmanager
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


class LeRobotDataset:
    """A dataset folder; nothing but its descriptions is read until episodes are asked for."""

    def __init__(self, folder: Path, named: str) -> None:
        """`named`: the config path that gave the folder, for errors.

        Raises:
            DataError: it is no LeRobot v3 folder, or holds no episode.
        """
        self._folder, self._where = folder, f"{named} is {str(folder)!r}"
        path = folder / "meta/info.json"
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            version, self.fps = str(described["codebase_version"]), float(described["fps"])
            self.features: dict[str, dict[str, Any]] = dict(described["features"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._where}, but {path} cannot be read ({error!r}): give the folder of a LeRobot dataset"
            ) from error
        if not version.startswith("v3"):
            raise DataError(
                f"{self._where}, but its codebase_version is {version!r} and v3 is needed: convert it with "
                "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
            )
        self._paths = {key: described.get(key) or path for key, path in PATHS.items()}
        # the words of a task are pandas' index, whose column has no fixed name
        rows = self._table(folder / "meta/tasks.parquet").to_pylist()
        self._tasks = {row.pop("task_index"): str(next(iter(row.values()))) for row in rows}
        tables = [self._table(path).to_pylist() for path in sorted(folder.glob("meta/episodes/*/*.parquet"))]
        self._episodes = sorted((entry for rows in tables for entry in rows), key=lambda entry: entry["episode_index"])
        if not self._episodes:
            raise DataError(f"{self._where}, but it holds no episode: record some, or give another folder")
        self._data: tuple[Path | None, Any] = None, None  # the last data file

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What its episodes do, in words."""
        return tuple(self._tasks.values())

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

    def read(
        self, numbers: Sequence[int], frames: slice = slice(None), cameras: Sequence[str] | None = None
    ) -> Iterator[LeRobotEpisode]:
        """Yields the episodes of these numbers, from 0, with the images of some frames and cameras (None: all).

        Raises:
            DataError: a file is missing or damaged, or does not hold what the descriptions promise.
        """
        for number in numbers:
            yield self._read(self._episodes[number], frames, self.cameras if cameras is None else cameras)

    def _read(self, entry: dict, frames: slice, cameras: Sequence[str]) -> LeRobotEpisode:
        number = entry["episode_index"]
        place = {"chunk_index": entry["data/chunk_index"], "file_index": entry["data/file_index"]}
        path = self._folder / self._paths["data_path"].format(**place)
        if self._data[0] != path:
            self._data = path, self._table(path)
        table = self._data[1]
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
        self._require_whole(f"frames of episode {number} in {path}", len(actions), entry["length"])
        chosen, images = range(len(actions))[frames], {}
        for camera in cameras:
            name = IMAGES + camera
            if self.features[name]["dtype"] == "video":
                images[camera] = self._from_video(entry, name, chosen)
            else:
                stored = (rows[name][k].as_py() for k in chosen)  # in the table, or in a file next to it
                sources = [io.BytesIO(s["bytes"]) if s.get("bytes") else self._folder / s["path"] for s in stored]
                images[camera] = np.stack([np.asarray(Image.open(source).convert("RGB")) for source in sources])
        return LeRobotEpisode(task, actions, state, images)

    def _table(self, path: Path) -> Any:
        import pyarrow.parquet  # takes long, and few runs need it

        with self._reading(path):
            return pyarrow.parquet.read_table(path)

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, FFmpegError) as error:
            raise DataError(f"{self._where}, but {path} cannot be read ({error}): copy the dataset anew") from error

    def _require_whole(self, what: str, found: int, promised: int) -> None:
        if found != promised:
            raise DataError(f"{self._where}, but there are {found} of {promised} {what}: copy the dataset anew")

    def _from_video(self, entry: dict, name: str, frames: Sequence[int]) -> np.ndarray:
        """Returns frames of an episode: those whose time is nearest, and within half a frame."""
        place = {part: entry[f"videos/{name}/{part}"] for part in ("chunk_index", "file_index")}
        path = self._folder / self._paths["video_path"].format(video_key=name, **place)
        start = float(entry[f"videos/{name}/from_timestamp"])
        wanted = {round(start * self.fps) + frame: k for k, frame in enumerate(frames)}
        found: dict[int, np.ndarray] = {}
        with self._reading(path), av.open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(int(start / (stream.time_base or 1)), stream=stream)
            for frame in container.decode(stream):
                at = wanted.get(round((frame.time or 0.0) * self.fps))
                if at is not None:
                    found[at] = frame.to_ndarray(format="rgb24")
                if len(found) == len(wanted):
                    break
        self._require_whole(f"images of episode {entry['episode_index']} in {path}", len(found), len(wanted))
        return np.stack([found[k] for k in range(len(wanted))])
