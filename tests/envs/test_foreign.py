"""What all simulators in environments of their own share: the wire, and the rows of a process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import libero_stand_in
import numpy as np
import pytest

from envs.foreign import wire
from envs.foreign.place import Place
from envs.foreign.rows import Rows
from envs.foreign.wire import Message
from rlinf_embodied.errors import SimulatorError


# ---------------------------------------------------------------------------------------------------------------- wire
def test_a_message_arrives_as_it_was_sent_whatever_its_size() -> None:
    ours, theirs = os.pipe()
    arrays = {
        "images": np.arange(3 * 400 * 400, dtype=np.int32).reshape(3, 400, 400),  # many times a pipe's buffer
        "none": np.zeros((0, 7), dtype=np.float32),
        "success": np.array([True, False]),
    }
    sender = threading.Thread(target=wire.send, args=(theirs, Message("step", {"rows": [0, 2]}, arrays)))
    sender.start()
    got = wire.receive(ours, 60)
    sender.join()
    assert (got.kind, got.values) == ("step", {"rows": [0, 2]})
    for name, array in arrays.items():
        assert got.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(got.arrays[name], array)


def test_half_a_message_is_waited_for_no_longer_than_allowed() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, wire.pack(Message("step"))[:-1])
    with pytest.raises(TimeoutError):
        wire.receive(ours, 0.05)
    os.close(theirs)
    with pytest.raises(EOFError):
        wire.receive(ours, 60)


# ---------------------------------------------------------------------------------------------------------------- rows
class Counted(libero_stand_in.Adding):
    """A stand-in's scene that tells when it and its renderers are closed."""

    closed: list[str]

    def open_eye(self) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: self.closed.append(f"eye {self.task}"))

    def close(self) -> None:
        self.closed.append(f"scene {self.task}")


def reset(rows: Rows, **tasks: int) -> None:
    """Resets rows to tasks, as reset(rows, r0=3)."""
    starts = [(task, 0, task) for task in tasks.values()]
    answer = rows.answer(Message("reset", {"rows": [int(name[1:]) for name in tasks], "starts": starts}))
    assert answer.kind == "state", answer.values


def test_scenes_are_built_once_and_the_one_that_waited_longest_goes_first() -> None:
    builds: list[int] = []
    closed: list[str] = []

    def build(task: int) -> Counted:
        scene = Counted(task, builds)
        scene.closed = closed
        return scene

    rows = Rows(build, ["agentview"], 4, num_spare=1)
    reset(rows, r0=0, r1=1)
    rows.answer(Message("images", {"rows": [0, 1]}))
    reset(rows, r0=0, r1=1)
    assert builds == [0, 1]
    reset(rows, r0=1, r1=0)  # row 0 needs a second scene of task 1, row 1 takes the one that row 0 left
    assert builds == [0, 1, 1]
    assert closed == []
    reset(rows, r0=2)
    reset(rows, r0=3)
    assert closed == ["scene 1", "eye 1", "scene 1"] or closed == ["scene 1", "scene 1", "eye 1"]


def test_an_expert_acts_for_the_rows_that_are_asked_for() -> None:
    class Pointing(libero_stand_in.Adding):
        def expert(self) -> np.ndarray:
            return np.full(2, self.task, dtype=np.float32)

    rows = Rows(lambda task: Pointing(task, []), [], 4)
    reset(rows, r0=3, r1=5)
    answer = rows.answer(Message("expert", {"rows": [1, 0]}))
    assert answer.arrays["actions"].tolist() == [[5, 5], [3, 3]]


def test_a_missing_environment_names_its_folder_and_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = Place("Sim", ".venv-sim", "RLINF_EMBODIED_SIM", "experiments.setup.sim")
    monkeypatch.setenv("RLINF_EMBODIED_SIM", str(tmp_path))
    with pytest.raises(SimulatorError, match=rf"{tmp_path} is none: install it by `python -m experiments\.setup\.sim`"):
        place.python()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert place.missing() == ""
