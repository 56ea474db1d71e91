"""Conversions between conventions undo each other, mean what their names say, and are those of a dataset's readers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy.spatial.transform import Rotation

from rlinf_embodied.data.conversions import _ENTRIES, ROTATIONS, Conversion
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.errors import ConfigError

SHARED = next((p for p in Path(__file__).parents if (p / "shared/oracles").exists()), None)
NUMBERS = st.floats(-1, 1, width=32)
PAIRS = [pair for names in (ROTATIONS, *_ENTRIES.values()) for pair in itertools.permutations(names, 2)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(st.lists(NUMBERS, min_size=8, max_size=8), st.lists(NUMBERS, min_size=8, max_size=8))
@settings(max_examples=25, deadline=None)
def test_a_conversion_undoes_its_inverse(source: str, target: str, given_values: list, state: list) -> None:
    values, states = np.array([given_values], np.float32), np.array([state], np.float32)
    if source in ROTATIONS:
        turned = ROTATIONS[source][2](Rotation.from_rotvec([given_values[1:4]]))  # by at most 100 degrees
        values = np.concatenate([values[:, :1], turned, values[:, 5:]], 1).astype(np.float32)
    made = Conversion.parse(f"1:{source}:{target}", "data")
    there = made.apply(values, states)
    assert there.shape[1] - values.shape[1] == made.inverse.last - made.last
    scale = max(1.0, float(np.abs(there).max()))
    np.testing.assert_allclose(made.inverse.apply(there, states), values, atol=3e-7 * scale, rtol=2e-6)


def test_rotations_mean_what_their_names_say() -> None:
    quarter = np.pi / 2
    same = {  # a quarter turn about z
        "quaternion_xyzw": [0, 0, np.sqrt(0.5), np.sqrt(0.5)],
        "quaternion_wxyz": [np.sqrt(0.5), 0, 0, np.sqrt(0.5)],
        "rotation_vector": [0, 0, quarter],
        "euler_xyz": [0, 0, quarter],
        "columns_6d": [0, 1, 0, -1, 0, 0],
    }
    for source, target in itertools.permutations(same, 2):
        made = Conversion.parse(f"0:{source}:{target}", "data").apply(np.array([same[source]]), np.zeros((1, 0)))
        np.testing.assert_allclose(made, [same[target]], atol=1e-6)
    roll, pitch, yaw = (np.eye(3)[None] + 0 for _ in range(3))
    for matrix, (i, j), angle in ((roll, (1, 2), 0.3), (pitch, (2, 0), -0.4), (yaw, (0, 1), 1.1)):
        matrix[0, [i, j], [i, j]], matrix[0, i, j], matrix[0, j, i] = np.cos(angle), -np.sin(angle), np.sin(angle)
    columns = Conversion(0, 2, "euler_xyz", "columns_6d").apply(np.array([[0.3, -0.4, 1.1]]), np.zeros((1, 0)))
    wanted = (yaw @ pitch @ roll)[0, :, :2].T.reshape(1, 6)
    np.testing.assert_allclose(columns, wanted, atol=1e-6)


@pytest.mark.skipif(SHARED is None, reason="shared/oracles is in no folder above the project's")
def test_rotations_equal_lerobots() -> None:
    assert SHARED is not None
    golden = load_file(SHARED / "shared/oracles/lerobot/processors/golden.safetensors")
    turned, nothing = golden["rotation.rotvec"], np.zeros((13, 0))
    found = Conversion(0, 2, "rotation_vector", "quaternion_xyzw").apply(turned, nothing)
    wanted = golden["rotation.quat_xyzw"]
    np.testing.assert_allclose(np.abs((found * wanted).sum(1)), 1, atol=1e-6)  # up to the sign
    columns = golden["rotation.matrix"][:, :, :2].transpose(0, 2, 1).reshape(13, 6)
    found = Conversion(0, 2, "rotation_vector", "columns_6d").apply(turned, nothing)
    np.testing.assert_allclose(found, columns, atol=1e-6)


def test_a_dataset_is_converted_and_measured_anew(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    state, actions = (drawn.normal(size=(9, size)).astype(np.float32) for size in (5, 5))
    write_dataset(tmp_path / "set", [LeRobotEpisode("x", actions, state, {})], 10, "arm")
    chosen = ["1:euler_xyz:columns_6d", "7:zero_one:signed_closed", "0:absolute:relative"]
    dataset = open_dataset(tmp_path / "set", "data", chosen, ["0-3:degrees:radians"])
    assert (dataset.size("action"), dataset.states) == (8, {"observation.state": 5})
    np.testing.assert_allclose(dataset.state[:, [0, 4]], state[:, [0, 4]] * [np.pi / 180, 1], rtol=1e-6)
    found = dataset.columns["action"]
    wanted = np.stack([actions[:, 0] - dataset.state[:, 0], 1 - 2 * actions[:, 4]], 1)
    np.testing.assert_allclose(found[:, [0, 7]], wanted, rtol=1e-5)
    np.testing.assert_allclose(dataset.statistics(["action"])["action"]["max"], found.max(0), rtol=1e-6)
    assert np.shape(dataset[3]["action"]) == (8,)


@pytest.mark.parametrize(
    ("actions", "state", "words"),
    [
        (["3:quaternion_xyzw:rotation_vector"], [], r"warm_start.convert_actions is '3:qua.*action has 5 entries here"),
        (["3:yaw:pitch"], [], "yaw is none of "),
        (["3:zero_one:radians"], [], "zero_one is one of grippers, and radians of angles"),
        (["0-3:euler_xyz:rotation_vector"], [], "euler_xyz has 3 entries: leave the last entry out"),
        (["gripper"], [], "a conversion is <first>:<from>:<to>"),
        ([], ["0:absolute:relative"], r"warm_start.convert_state is .*relative to the same entries of the state"),
    ],
)
def test_what_is_no_conversion_is_refused(actions: list[str], state: list[str], words: str, tmp_path: Path) -> None:
    rows = np.zeros((4, 5), np.float32)
    write_dataset(tmp_path / "set", [LeRobotEpisode("x", rows, rows, {})], 10, "arm")
    with pytest.raises(ConfigError, match=words):
        open_dataset(tmp_path / "set", "data", actions, state)
