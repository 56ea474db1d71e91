"""LeRobot datasets of format v3 and v2, read without the lerobot package; lerobot_writer.py writes v3.

                    v3                                           v2
descriptions        meta/info.json: features {name: {dtype, shape}}, fps, templates of the paths of data and videos
tasks               meta/tasks.parquet                           meta/tasks.jsonl
statistics          meta/stats.json                              meta/episodes_stats.jsonl, or meta/stats.json
episodes            meta/episodes/chunk-000/file-000.parquet     meta/episodes.jsonl
frames              data/chunk-000/file-000.parquet              data/chunk-000/episode_000000.parquet
images              videos/<feature>/chunk-000/file-000.mp4      videos/chunk-000/<feature>/episode_000000.mp4,
                    or PNG in the table of frames                or PNG in the table of frames

A file of v3 holds many episodes, one after the other; a file of v2 holds one.
"""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from PIL import Image

from rlinf_embodied.data.recorded import RecordedDataset
from rlinf_embodied.data.statistics import Statistics, combine, parsed, read_statistics
from rlinf_embodied.errors import DataError

PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
_MOST_OPEN = 8  # videos, or row groups of tables with images, that are kept open


@dataclass(frozen=True, slots=True)
class LeRobotEpisode:
    """One episode to be written: T frames, each with its observation and action."""

    task: str  # in words
    actions: np.ndarray  # float32 [T, A]
    state: np.ndarray  # float32 [T, P]
    images: Mapping[str, np.ndarray]  # by camera, uint8 [T, height, width, 3]

    def __len__(self) -> int:
        return len(self.actions)


class LeRobotDataset(RecordedDataset):
    """A dataset folder."""

    def __init__(
        self,
        folder: Path,
        named: str = "data",
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        episodes: Sequence[int] | None = None,
    ) -> None:
        """Reads the descriptions.

        Args:
            folder: the folder that contains meta/info.json.
            named: the config path of the folder, for error messages.
            delta_timestamps: windows of an item's features, in seconds (RecordedDataset).
            episodes: numbers of the episodes to read; None: all.  Frames are numbered over these only.

        Raises:
            DataError: the folder is not a LeRobot dataset of v2 or v3, or it holds no episode.
        """
        self._folder, self.where = folder, f"{named} is {str(folder)!r}"
        path = folder / "meta/info.json"
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
            version, self.fps = str(info["codebase_version"]), float(info["fps"])
            self.features: dict[str, dict[str, Any]] = dict(info["features"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self.where}, but {path} cannot be read ({error!r}): give the folder of a LeRobot dataset"
            ) from error
        if not version.startswith(("v2", "v3")):
            raise DataError(
                f"{self.where}, but its codebase_version is {version!r}, and v2 and v3 are read: convert it"
            )
        self._paths = {key: info.get(key) or path for key, path in PATHS.items()}
        read = self._read_v2 if version.startswith("v2") else self._read_v3
        self._tasks, entries = read(int(info.get("chunks_size") or 1000))
        entries.sort(key=lambda entry: entry["episode_index"])
        known = {entry["episode_index"] for entry in entries}
        if missing := sorted({*(episodes or ())} - known):
            raise DataError(f"{self.where}, which has no episodes {missing}, but {len(known)}: name others")
        self._entries = [entry for entry in entries if episodes is None or entry["episode_index"] in episodes]
        if not self._entries:
            raise DataError(f"{self.where}, but it holds no episode: record some, or give another folder")
        self.lengths = np.array([entry["length"] for entry in self._entries], np.int64)
        self._places = np.zeros((0, 2), np.int64)  # of each frame: index in _files, and row in that file
        self._files: list[Path] = []
        self._open = threading.local()  # per thread, since decoders cannot be shared
        super().__init__(delta_timestamps)

    # ----------------------------------------------------------------------------------------------------- descriptions
    def _read_v3(self, chunks_size: int) -> tuple[dict[int, str], list[dict[str, Any]]]:
        self.measured = read_statistics(self._folder / "meta/stats.json", self.where)
        # the text of a task is pandas' index, whose column has no fixed name
        rows = self._table(self._folder / "meta/tasks.parquet").to_pylist()
        tasks = {row.pop("task_index"): str(next(iter(row.values()))) for row in rows}
        paths = sorted(self._folder.glob("meta/episodes/*/*.parquet"))
        wanted = lambda name: not name.startswith("stats/")  # noqa: E731
        return tasks, [entry for path in paths for entry in self._table(path, wanted).to_pylist()]

    def _read_v2(self, chunks_size: int) -> tuple[dict[int, str], list[dict[str, Any]]]:
        meta = self._folder / "meta"
        self.measured = read_statistics(meta / "stats.json", self.where)
        if not self.measured and (meta / "episodes_stats.jsonl").exists():
            parts = [parsed(line["stats"]) for line in self._lines(meta / "episodes_stats.jsonl")]
            of_feature: dict[str, list[Statistics]] = {}
            for part in parts:
                for name, statistics in part.items():
                    of_feature.setdefault(name, []).append(statistics)
            self.measured = {name: combine(episodes) for name, episodes in of_feature.items()}
        entries = self._lines(meta / "episodes.jsonl")
        for entry in entries:
            entry["episode_chunk"] = entry["episode_index"] // chunks_size
        return {line["task_index"]: line["task"] for line in self._lines(meta / "tasks.jsonl")}, entries

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        with self._reading(path):
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._tasks.values())

    def task(self, row: int) -> str:
        return self._tasks[int(self.columns["task_index"][row])]

    def _path(self, entry: Mapping[str, Any], feature: str | None = None) -> Path:
        """Returns the file of an episode's frames, or of its images of a feature."""
        prefix = "data" if feature is None else f"videos/{feature}"
        chunk = entry.get(f"{prefix}/chunk_index", entry.get("episode_chunk", 0))
        file = entry.get(f"{prefix}/file_index", 0)
        template = self._paths["data_path" if feature is None else "video_path"]
        names = {"chunk_index": chunk, "file_index": file, "episode_chunk": chunk, "episode_file": file}
        return self._folder / template.format(**names, video_key=feature, episode_index=entry["episode_index"])

    # ---------------------------------------------------------------------------------------------------------- vectors
    def _read_columns(self) -> dict[str, np.ndarray]:
        of_file: dict[Path, list[int]] = {}
        for number, entry in enumerate(self._entries):
            of_file.setdefault(self._path(entry), []).append(number)
        self._files = list(of_file)
        self._places = np.zeros((len(self), 2), np.int64)
        columns: dict[str, np.ndarray] = {}
        images = {*self.cameras.values()}
        for file, (path, numbers) in enumerate(of_file.items()):
            table = self._table(path, lambda name: name not in images)
            where = f"{self.where}, but frames in {path}"
            try:
                parts = {name: self._array(table[name], name) for name in table.column_names}
                episode, frame = parts["episode_index"], parts["frame_index"]
            except (KeyError, ValueError, TypeError) as error:
                raise DataError(f"{where} are not those of meta/info.json ({error!r}): copy it anew") from error
            order = np.lexsort((frame, episode))
            for number in numbers:
                entry, rows = self._entries[number], self.frames(number)
                first, last = np.searchsorted(episode[order], [entry["episode_index"], entry["episode_index"] + 1])
                what = f"frames of episode {entry['episode_index']} in {path}"
                self._require_whole(what, int(last - first), len(rows))
                table_rows = order[first:last]
                self._places[rows.start : rows.stop] = np.stack([np.full(len(table_rows), file), table_rows], 1)
                for name, values in parts.items():
                    if name not in columns:
                        columns[name] = np.zeros((len(self), *values.shape[1:]), values.dtype)
                    columns[name][rows.start : rows.stop] = values[table_rows]
        if missing := {n for n in self.features if n not in columns and n not in images}:
            raise DataError(f"{self.where}, but its files lack {sorted(missing)} of meta/info.json: copy it anew")
        return columns

    def _array(self, column: Any, name: str) -> np.ndarray:
        """Returns a column of a table as float32, int64, bool or str, [rows, ...]."""
        shape = tuple(self.features[name]["shape"]) if name in self.features else (-1,)
        values, nested = column.combine_chunks(), False
        while hasattr(values.type, "value_type"):
            values, nested = values.flatten(), True
        array = values.to_numpy(zero_copy_only=False)
        kinds = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}
        array = array.astype(kinds[array.dtype.kind]) if array.dtype.kind in kinds else array
        return array.reshape(len(column), *shape) if nested else array

    def _table(self, path: Path, wanted: Any = None) -> Any:
        import pyarrow.parquet  # slow to import, and few runs need it

        with self._reading(path):
            names = None
            if wanted is not None:
                names = [name for name in pyarrow.parquet.read_schema(path).names if wanted(name)]
            return pyarrow.parquet.ParquetFile(path).read(columns=names)

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, FFmpegError) as error:
            raise DataError(f"{self.where}, but {path} cannot be read ({error}): copy the dataset anew") from error

    def _require_whole(self, what: str, number: int, expected: int) -> None:
        if number != expected:
            raise DataError(f"{self.where}, but there are {number} of {expected} {what}: copy the dataset anew")

    # ----------------------------------------------------------------------------------------------------------- images
    def _read_images(self, feature: str, rows: np.ndarray) -> np.ndarray:
        if self.features[feature]["dtype"] == "image":
            assert self.columns  # reading them also sets _places
            return np.stack([self._from_table(feature, *place) for place in self._places[rows]])
        episodes = np.searchsorted(self.ends, rows, side="right")
        return np.concatenate([self._from_video(feature, e, rows[episodes == e]) for e in np.unique(episodes)])

    def _kept_open(self, key: tuple, make: Any) -> Any:
        """Returns this thread's open object of a key, or makes it; closes the least recently used one of too many."""
        opened: OrderedDict = self._open.__dict__.setdefault("opened", OrderedDict())
        if key not in opened:
            opened[key] = make()
            if len(opened) > _MOST_OPEN:
                _, oldest = opened.popitem(last=False)
                getattr(oldest, "close", lambda: None)()
        opened.move_to_end(key)
        return opened[key]

    def _from_table(self, feature: str, file: int, row: int) -> np.ndarray:
        import pyarrow.parquet

        path = self._files[file]
        with self._reading(path):
            table = self._kept_open((path,), lambda: pyarrow.parquet.ParquetFile(path, memory_map=True))
            ends = np.cumsum([table.metadata.row_group(k).num_rows for k in range(table.num_row_groups)])
            group = int(np.searchsorted(ends, row, side="right"))
            read = lambda: table.read_row_group(group, columns=[feature])[feature]  # noqa: E731
            column = self._kept_open((path, feature, group), read)
            stored = column[row - (int(ends[group - 1]) if group else 0)].as_py()
            source = io.BytesIO(stored["bytes"]) if stored.get("bytes") else self._folder / stored["path"]
            return np.asarray(Image.open(source).convert("RGB"))

    def _from_video(self, feature: str, episode: int, rows: np.ndarray) -> np.ndarray:
        """Returns the images of ascending frames of an episode: for each the nearest one, at most half a frame away."""
        entry = self._entries[episode]
        path = self._path(entry, feature)
        start = float(entry.get(f"videos/{feature}/from_timestamp", 0.0))
        times = start + self.columns["timestamp"][rows].astype(np.float64)
        half, images = 0.5 / self.fps, []
        with self._reading(path):
            container = self._kept_open((path,), lambda: _opened(path))
            stream = container.streams.video[0]
            container.seek(max(0, int((times[0] - half) / stream.time_base)), stream=stream)
            previous: Any = None
            for frame in container.decode(stream):
                while len(images) < len(times) and frame.time > times[len(images)] - 1e-9:
                    time = times[len(images)]
                    near = min((f for f in (previous, frame) if f is not None), key=lambda f: abs(f.time - time))
                    if abs(near.time - time) >= half:
                        break
                    images.append(near.to_ndarray(format="rgb24"))
                if len(images) == len(times):
                    break
                previous = frame
            while len(images) < len(times) and previous is not None and abs(previous.time - times[len(images)]) < half:
                images.append(previous.to_ndarray(format="rgb24"))
        self._require_whole(f"images of episode {entry['episode_index']} in {path}", len(images), len(times))
        return np.stack(images)


def _opened(path: Path) -> Any:
    """Opens a video to decode with one thread, since workers share the cores."""
    container = av.open(str(path))
    container.streams.video[0].codec_context.thread_count = 1
    return container
