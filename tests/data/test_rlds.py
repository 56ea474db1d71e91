"""RLDS folders: what was encoded is decoded, as items of LeRobot's form, and what is damaged is named."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlinf_embodied.data.rlds import RldsDataset
from rlinf_embodied.errors import DataError


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    low = value & 127
    return bytes([low]) if value < 128 else bytes([low | 128]) + varint(value >> 7)


def feature(values: np.ndarray | list[bytes]) -> bytes:
    if isinstance(values, list):
        return field(1, b"".join(field(1, value) for value in values))
    if values.dtype == np.float32:
        return field(2, field(1, values.tobytes()))
    return field(3, field(1, b"".join(varint(int(value)) for value in values.reshape(-1))))


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


LENGTHS = (3, 5)
TENSOR = {"tensor": {"shape": {"dimensions": ["2"]}, "dtype": "float32"}}
STEP = {
    "action": TENSOR,
    "is_last": {"tensor": {"shape": {}, "dtype": "bool"}},
    "count": {"tensor": {"shape": {}, "dtype": "int64"}},
    "language_instruction": {"text": {}},
    "observation": {
        "featuresDict": {
            "features": {
                "state": TENSOR,
                "wrist": {"image": {"shape": {"dimensions": ["4", "6", "3"]}, "dtype": "uint8"}},
                "depth": {"image": {"shape": {"dimensions": ["4", "6", "1"]}, "dtype": "float32"}},
            }
        }
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    steps = {"sequence": {"feature": {"featuresDict": {"features": STEP}}}}
    (tmp_path / "features.json").write_text(json.dumps({"featuresDict": {"features": {"steps": steps}}}))
    for number, length in enumerate(LENGTHS):  # a file each
        numbers = np.arange(2 * length, dtype=np.float32).reshape(length, 2)
        images = [np.full((4, 6, 3), 10 * number + k, np.uint8) for k in range(length)]
        values = {
            "action": numbers + 100 * number,
            "is_last": np.arange(length) == length - 1,
            "count": -np.arange(length),
            "language_instruction": [f"task {number}".encode()] * length,
            "observation/state": -numbers,
            "observation/wrist": [png(image) for image in images],
        }
        entries = [field(1, f"steps/{name}".encode()) + field(2, feature(v)) for name, v in values.items()]
        example = field(1, b"".join(field(1, entry) for entry in entries))
        record = struct.pack("<QI", len(example), 0) + example + bytes(4)
        (tmp_path / f"toy-train.tfrecord-0000{number}-of-00002").write_bytes(record)
    return tmp_path


def test_episodes_are_items_of_lerobots_form(folder: Path) -> None:
    dataset = RldsDataset(folder, "data", {"action": [0, 1, 2]})
    assert (len(dataset), dataset.num_episodes, dataset.tasks) == (8, 2, ("task 0", "task 1"))
    assert (dataset.states, list(dataset.cameras)) == ({"observation.state": 2}, ["wrist"])
    item = dataset[6]  # the fourth step of the second episode
    assert item["action"].tolist() == [[106, 107], [108, 109], [108, 109]]
    assert item["action_is_pad"].tolist() == [False, False, True]
    assert (item["is_last"], item["count"], item["task"], item["frame_index"]) == (False, -3, "task 1", 3)
    assert item["observation.state"].tolist() == [-6, -7]
    assert (item["observation.images.wrist"] * 255).round().unique().tolist() == [13]
    assert dataset.images("wrist", [7, 0, 2]).mean((1, 2, 3)).tolist() == [14, 0, 2]


def test_what_is_damaged_is_named(folder: Path) -> None:
    file = folder / "toy-train.tfrecord-00001-of-00002"
    whole = file.read_bytes()
    for content in (whole[:-9], whole[:12] + b"\xff" * (len(whole) - 12)):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"data is .*00001-of-00002 is damaged .*: copy the dataset anew"):
            RldsDataset(folder, "data")
    for path in folder.glob("*.tfrecord*"):
        path.unlink()
    with pytest.raises(DataError, match="holds no episode"):
        RldsDataset(folder, "data")
    (folder / "features.json").write_text("{")
    with pytest.raises(DataError, match=r"features.json cannot be read"):
        RldsDataset(folder, "data")
