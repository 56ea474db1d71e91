"""What all simulators in separate environments share: the wire, and the rows of a process."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import libero_stand_in
import numpy as np
import pytest

from envs.foreign import wire
from envs.foreign.worker import Rows
from envs.libero import LiberoOptions


# ---------------------------------------------------------------------------------------------------------------- wire
def test_a_message_arrives_as_it_was_sent_whatever_its_size() -> None:
    ours, theirs = Pipe()
    arrays = {
        "images": np.arange(3 * 400 * 400, dtype=np.int32).reshape(3, 400, 400),  # many times a pipe's buffer
        "none": np.zeros((0, 7), dtype=np.float32),
        "success": np.array([True, False]),
        "scalar": np.array(1.5),
    }
    sender = threading.Thread(target=wire.send, args=(theirs, {"kind": "step", "rows": [0, 2], **arrays}))
    sender.start()
    got = wire.receive(ours, 60)
    sender.join()
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got.pop(name), array)
    assert got == {"kind": "step", "rows": [0, 2]}
    with pytest.raises(TimeoutError):
        wire.receive(ours, 0.05)
    theirs.close()
    with pytest.raises(EOFError):
        wire.receive(ours, 60)


# ---------------------------------------------------------------------------------------------------------------- rows
class Counted(libero_stand_in.Adding):
    """A stand-in's scene that notes when it and its renderers are closed."""

    def __init__(self, task: int, closed: list[str]) -> None:
        self.task, self.closed = task, closed

    def open_renderer(self) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: self.closed.append(f"renderer {self.task}"))

    def expert(self) -> np.ndarray:
        return np.full(2, self.task, dtype=np.float32)

    def close(self) -> None:
        self.closed.append(f"scene {self.task}")


class Counting(libero_stand_in.StandIn):
    def __init__(self) -> None:
        super().__init__("libero_goal", LiberoOptions(spare_scenes=1))
        self.builds: list[int] = []
        self.closed: list[str] = []

    def scene(self, task: int) -> Counted:
        self.builds.append(task)
        return Counted(task, self.closed)


def reset(rows: Rows, **tasks: int) -> None:
    """Resets rows to tasks, as reset(rows, r0=3)."""
    starts = [(task, 0, task) for task in tasks.values()]
    question = {"kind": "reset", "rows": [int(name[1:]) for name in tasks], "starts": starts}
    assert rows.run(question)["kind"] == "state"


def test_scenes_are_built_once_and_the_one_that_waited_longest_goes_first() -> None:
    adapter = Counting()
    rows, builds, closed = Rows(adapter, ["agentview"], 4), adapter.builds, adapter.closed
    reset(rows, r0=0, r1=1)
    rows.run({"kind": "images", "rows": [0, 1]})
    reset(rows, r0=0, r1=1)
    assert builds == [0, 1]
    reset(rows, r0=1, r1=0)  # each row takes the scene that the other one left
    assert builds == [0, 1]
    reset(rows, r0=2)
    assert builds == [0, 1, 2]
    assert closed == []
    reset(rows, r0=3)
    assert builds == [0, 1, 2, 3]
    assert closed == ["scene 1", "renderer 1"]
    rows.close()
    assert len(closed) == len(builds) + 2


def test_an_expert_acts_for_the_rows_that_are_asked_for() -> None:
    rows = Rows(Counting(), [], 4)
    reset(rows, r0=3, r1=5)
    assert rows.run({"kind": "expert", "rows": [1, 0]})["actions"].tolist() == [[5, 5], [3, 3]]
