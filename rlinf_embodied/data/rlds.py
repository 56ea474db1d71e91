"""RLDS datasets (of Open X-Embodiment), read without TensorFlow: TFRecord files that hold an episode per record.

features.json           features of a step: action, observation/..., language_instruction
<name>-train.tfrecord-* records: length (8 bytes), its checksum (4), a tf.train.Example, its checksum (4)

    Example {1: Features {1: entry {1: name, 2: Feature {1: bytes list | 2: float list | 3: int64 list}} ...}}

An entry holds the values of all steps, one after the other.  Checksums are not verified.

    steps/action                     action
    steps/observation/<image>        observation.images.<image>
    steps/observation/<vector>       observation.<vector>
    steps/<other>                    <other>

RLDS does not record the number of steps per second: fps is 1, and timestamps count steps.
"""

from __future__ import annotations

import io
import json
import mmap
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf_embodied.data.recorded import IMAGES, RecordedDataset
from rlinf_embodied.errors import DataError

DESCRIPTION = "features.json"
_STEPS, _OBSERVATION = "steps/", "observation/"
_HEADER, _FOOTER = 12, 4  # bytes around a record
_Feature = memoryview  # an encoded tf.train.Feature
_DTYPES = {"float32": np.float32, "float64": np.float32, "bool": np.bool_}


class RldsDataset(RecordedDataset):
    """A folder of one version of a dataset, as tensorflow_datasets writes it; only its train split if it has one."""

    fps = 1.0

    def __init__(self, folder: Path, named: str = "data", delta_timestamps: Mapping[str, Any] | None = None) -> None:
        """Reads the descriptions and the lengths of the episodes; arguments as LeRobotDataset.

        Raises:
            DataError: the folder is not an RLDS dataset, a file is damaged, or there is no episode.
        """
        self.where, self.measured = f"{named} is {str(folder)!r}", {}
        path = folder / DESCRIPTION
        try:
            described = dict(_leaves(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self.where}, but {path} cannot be read ({error!r}): give the folder of an RLDS dataset"
            ) from error
        steps = {name: feature for name, feature in described.items() if name.startswith(_STEPS)}
        self._names = {_lerobot_name(name, feature): name for name, feature in steps.items()}
        self._texts = [name for name in steps if name.endswith("instruction")]
        self.features = {name: _lerobot_feature(described[record_name]) for name, record_name in self._names.items()}
        self.features = {n: f for n, f in self.features.items() if f["dtype"] != "text" and min(f["shape"]) > 0}
        counted = {"timestamp": "float32"} | dict.fromkeys(
            ("frame_index", "episode_index", "index", "task_index"), "int64"
        )
        self.features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in counted.items()}
        files = sorted(folder.glob("*.tfrecord*"))
        files = [file for file in files if "-train." in file.name] or files
        self._episodes = [record for file in files for record in self._records(file)]
        if not self._episodes:
            raise DataError(f"{self.where}, but it holds no episode: give a folder with .tfrecord files")
        self.lengths = np.array([self._length(episode) for episode in self._episodes], np.int64)
        super().__init__(delta_timestamps)

    def _records(self, path: Path) -> Iterator[dict[str, _Feature]]:
        """Yields the features of every record; nothing is copied."""
        if path.stat().st_size == 0:
            return
        with path.open("rb") as file:
            content, at = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            end = at + _HEADER + size
            try:
                if end + _FOOTER > len(content):
                    raise ValueError("it ends within a record")
                yield _example(content[at + _HEADER : end])
            except (ValueError, IndexError, KeyError) as error:
                raise DataError(f"{self.where}, but {path} is damaged ({error!r}): copy the dataset anew") from error
            at = end + _FOOTER

    def _length(self, episode: Mapping[str, _Feature]) -> int:
        """Returns the number of steps, computed from the feature with the fewest values per step."""
        sizes = {n: int(np.prod(f["shape"])) for n, f in self.features.items() if n in self._names}
        name = min((n for n in sizes if n not in self.cameras.values()), key=lambda n: sizes[n])
        return len(self._values(episode, name)) // sizes[name]

    def _values(self, episode: Mapping[str, _Feature], name: str) -> Any:
        record_name = self._names[name]
        if record_name not in episode:
            raise DataError(f"{self.where}, but a record has no {record_name} of {DESCRIPTION}: copy the dataset anew")
        return _decoded(episode[record_name])

    # ----------------------------------------------------------------------------------------------------------- frames
    def _read_columns(self) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = {}
        for name in self._names:
            if name not in self.features or name in self.cameras.values():
                continue
            feature = self.features[name]
            shape, dtype = tuple(feature["shape"]), _DTYPES.get(feature["dtype"], np.int64)
            parts = [np.asarray(self._values(episode, name), dtype) for episode in self._episodes]
            for number, (part, length) in enumerate(zip(parts, self.lengths, strict=True)):
                if part.size != length * int(np.prod(shape)):
                    rule = f"{part.size} values of {name} for {length} steps"
                    raise DataError(f"{self.where}, but episode {number} has {rule}: copy the dataset anew")
            columns[name] = np.concatenate(parts).reshape(-1, *(shape if shape != (1,) else ()))
        steps = np.concatenate([np.arange(length) for length in self.lengths])
        numbers = np.repeat(np.arange(self.num_episodes), self.lengths)
        columns |= {"frame_index": steps, "episode_index": numbers, "index": np.arange(len(self))}
        of_task = {task: number for number, task in enumerate(self.tasks)}
        return columns | {
            "timestamp": steps.astype(np.float32),
            "task_index": np.array([of_task[instruction] for instruction in self._instructions], np.int64),
        }

    def _read_images(self, feature: str, rows: np.ndarray) -> np.ndarray:
        images, episodes = [], np.searchsorted(self.ends, rows, side="right")
        for number in np.unique(episodes):
            stored = self._values(self._episodes[number], feature)
            for row in rows[episodes == number] - (self.ends - self.lengths)[number]:
                try:
                    images.append(np.asarray(Image.open(io.BytesIO(stored[row])).convert("RGB")))
                except (OSError, IndexError) as error:
                    what = f"{feature} of step {row} of episode {number}"
                    raise DataError(f"{self.where}, but {what} cannot be read ({error}): leave it out") from error
        return np.stack(images)

    @cached_property
    def _instructions(self) -> list[str]:
        """The instruction of every step; "" if the dataset has none."""
        if not self._texts:
            return [""] * len(self)
        return [bytes(text).decode() for episode in self._episodes for text in _decoded(episode[self._texts[0]])]

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._instructions))

    def task(self, row: int) -> str:
        return self._instructions[row]


# ------------------------------------------------------------------------------------------------------- descriptions
def _leaves(feature: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the leaf features of features.json: their names in records, and their descriptions."""
    if "featuresDict" in feature:
        for key, part in feature["featuresDict"]["features"].items():
            yield from _leaves(part, f"{name}/{key}" if name else key)
    elif "sequence" in feature and "featuresDict" in feature["sequence"]["feature"]:
        yield from _leaves(feature["sequence"]["feature"], name)
    else:
        yield name, feature


def _lerobot_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a feature's description in LeRobot's form; text and unsupported ones have the dtype "text"."""
    for kind in ("image", "tensor"):
        if kind in feature:
            shape = [int(size) for size in feature[kind]["shape"].get("dimensions", [])] or [1]
            if kind == "tensor":
                return {"dtype": feature[kind]["dtype"], "shape": shape, "names": None}
            if feature[kind].get("dtype", "uint8") == "uint8" and shape[-1] == 3:
                return {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
    return {"dtype": "text", "shape": [1], "names": None}


def _lerobot_name(name: str, feature: Mapping[str, Any]) -> str:
    """Returns LeRobot's name of the feature that records call `name`."""
    name = name.removeprefix(_STEPS)
    if not name.startswith(_OBSERVATION):
        return name.replace("/", ".")
    prefix = IMAGES if "image" in feature else "observation."
    return prefix + name.removeprefix(_OBSERVATION).replace("/", ".")


# --------------------------------------------------------------------------------------------- protobuf's wire format
def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of a message's fields: integers, or bytes as a view."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire, size = key & 7, 0
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field of the unknown type {wire}")
        if at + size > len(message):
            raise ValueError("a field ends after its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns an integer, and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _example(record: memoryview) -> dict[str, _Feature]:
    """Returns the features of a tf.train.Example by name, not decoded."""
    features_by_name = {}
    for _, features in _fields(record):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            features_by_name[bytes(parts[1]).decode()] = parts.get(2, memoryview(b""))
    return features_by_name


def _decoded(feature: _Feature) -> np.ndarray | list[memoryview]:
    """Returns the values of a feature: numbers, or bytes."""
    for kind, values in _fields(feature):
        parts = [part for _, part in _fields(values)]
        if kind == 1:
            return parts
        if kind == 2:
            return np.frombuffer(b"".join(parts), "<f4")
        numbers: list[int] = []
        for part in parts:  # packed, or one by one
            at, packed = 0, isinstance(part, memoryview)
            numbers += [] if packed else [part]
            while packed and at < len(part):
                number, at = _varint(part, at)
                numbers.append(number)
        return np.array(numbers, np.uint64).astype(np.int64)
    return []
