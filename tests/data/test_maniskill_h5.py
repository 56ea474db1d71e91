"""ManiSkill's trajectory files: what is read, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from recordings import write_recording

from rlinf_embodied.data.maniskill_h5 import read_recording
from rlinf_embodied.errors import DataError

NAMED = "warm_start.demonstrations"
EPISODES = [(7, np.full((5, 2), 0.5, np.float32)), (9, np.zeros((3, 2), np.float64))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "demos.h5", EPISODES)


def change(path: Path, edit) -> None:
    description = path.with_suffix(".json")
    content = json.loads(description.read_text())
    edit(content)
    description.write_text(json.dumps(content))


def test_episodes_are_their_seeds_and_actions(path: Path) -> None:
    recording = read_recording(path, NAMED)
    assert (recording.task, recording.control_mode) == ("PointReach-v0", "pd_ee_delta_pose")
    assert [(e.name, e.seed, e.actions.shape) for e in recording.episodes] == [
        ("traj_0", 7, (5, 2)),
        ("traj_1", 9, (3, 2)),
    ]
    assert all(e.actions.dtype == np.float32 for e in recording.episodes)


def test_the_seed_may_stand_where_older_versions_wrote_it(path: Path) -> None:
    def old(content: dict) -> None:
        for entry in content["episodes"]:
            entry["reset_kwargs"]["seed"] = [entry.pop("episode_seed")]  # of an env of one row

    change(path, old)
    assert [e.seed for e in read_recording(path, NAMED).episodes] == [7, 9]


def test_what_is_missing_or_unusable_is_named(path: Path, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(DataError, match=rf"(?s)warm_start.demonstrations is '.*demos.h5', but .*{words}"):
            read_recording(path, NAMED)

    content = path.with_suffix(".json").read_text()
    path.with_suffix(".json").unlink()
    refused("demos.json cannot be read .* writes it next to the .h5 file")
    for edit, words in (
        (lambda c: c.pop("env_info"), "no trajectory file of ManiSkill's RecordEpisode"),
        (lambda c: c["episodes"].clear(), "holds no episode"),
        (
            lambda c: c["episodes"][1].update(episode_seed=None),
            r"traj_1 has the seed None: record episodes with reset\(seed",
        ),
        (lambda c: c["episodes"][1].update(control_mode="pd_joint_pos"), "several control modes"),
        (lambda c: c["episodes"][1].update(episode_id=5), "traj_5"),
    ):
        path.with_suffix(".json").write_text(content)
        change(path, edit)
        refused(words)
    path.with_suffix(".json").write_text(content)
    with h5py.File(path, "a") as file:
        del file["traj_1/actions"]
        file["traj_1"]["actions"] = np.zeros((0, 2), np.float32)
    refused(r"the actions of traj_1 are float32 \[0, 2\]")
    path.write_bytes(b"no HDF5")
    refused("no trajectory file")
