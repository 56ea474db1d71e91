"""Checkpoints are written while training goes on: of the snapshot, one at a time, and what fails is told."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_embodied.errors import CheckpointWriteError
from rlinf_embodied.learning import checkpoint as C
from rlinf_embodied.learning import checkpoint_writer as W
from rlinf_embodied.learning.checkpoint_writer import CheckpointWriter

WEIGHTS = torch.zeros(4)


def write_policy(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "deeper").mkdir()
    save_file({"w": WEIGHTS}, folder / "deeper/model.safetensors")


def save(writer: CheckpointWriter, root: Path, step: int, moments: torch.Tensor | None = None) -> None:
    tensors = {"policy_optimizer": {"mean": torch.full((3,), float(step)) if moments is None else moments}}
    writer.save(root, step, policy_writer=write_policy, tensors=tensors, state={"iteration": step})


@pytest.fixture
def held(monkeypatch) -> threading.Event:
    """Checkpoints are sealed once this is set."""
    may, seal = threading.Event(), W._seal
    monkeypatch.setattr(W, "_seal", lambda *arguments: (may.wait(60), seal(*arguments)))
    return may


def test_the_caller_goes_on_and_the_checkpoint_is_of_the_moment_of_the_call(tmp_path, held, monkeypatch) -> None:
    weights, moments = torch.ones(4), torch.ones(3)
    monkeypatch.setitem(globals(), "WEIGHTS", weights)
    writer = CheckpointWriter()
    save(writer, tmp_path, 1, moments)
    weights += 1  # training steps, in place
    moments += 1
    assert C.find_latest(tmp_path) is None
    held.set()
    writer.wait()
    path = tmp_path / "step_000001"
    assert C.verify(path).step == 1
    assert C.load_tensors(path, "policy_optimizer")["mean"].tolist() == [1, 1, 1]
    assert load_file(path / "deeper/model.safetensors")["w"].tolist() == [1, 1, 1, 1]


def test_one_is_written_at_a_time_and_in_their_order(tmp_path, monkeypatch) -> None:
    running, seal = [], W._seal

    def slow(folder: Path, step: int, sequence: int) -> None:
        running.append(step)
        time.sleep(0.05)
        seal(folder, step, sequence)
        assert running[-1] == step

    monkeypatch.setattr(W, "_seal", slow)
    writer = CheckpointWriter()
    for step in (1, 2, 3):
        save(writer, tmp_path, step)
    writer.wait()
    assert running == [1, 2, 3]
    assert [C.verify(tmp_path / f"step_00000{step}").sequence for step in (1, 2, 3)] == [1, 2, 3]


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("told_by", ["wait", "save"])
def test_what_could_not_be_written_is_told_once_and_the_next_one_can_be(tmp_path, monkeypatch, told_by) -> None:
    writer = CheckpointWriter()
    save(writer, tmp_path, 1)
    writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(W, "save_file", full)
        save(writer, tmp_path, 2)
        futures.wait([writer._pending])
    with pytest.raises(CheckpointWriteError, match=r"step_000002 could not be written .*No space left .* free space"):
        writer.wait() if told_by == "wait" else save(writer, tmp_path, 3)
    assert C.find_latest(tmp_path) == tmp_path / "step_000001"
    save(writer, tmp_path, 4)
    writer.wait()
    assert C.find_latest(tmp_path) == tmp_path / "step_000004"


WRITES: list[tuple[object, str]] = [
    *((W, name) for name in ("save_file", "_sync")),
    *((Path, name) for name in ("mkdir", "write_text", "rename", "symlink_to")),
    (os, "replace"),
]


def full_from(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Lets `number` writes succeed and all that follow fail; returns what tells how many were tried."""
    tried = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def write(*arguments: object, **options: object) -> object:
            nonlocal tried
            tried += 1
            return full() if tried > number else original(*arguments, **options)

        return write

    for place, name in WRITES:
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    return lambda: tried


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_disk_that_is_full_from_any_moment_on_costs_the_checkpoint_under_way_only(tmp_path, step: int) -> None:
    for number in range(100):
        root = tmp_path / str(number)
        writer = CheckpointWriter()
        save(writer, root, 1, torch.full((3,), 7.0))
        writer.wait()
        with pytest.MonkeyPatch.context() as patch:
            tried = full_from(patch, number)
            try:
                save(writer, root, step)
                writer.wait()
                is_written = True
            except CheckpointWriteError as error:
                assert "older ones are untouched: free space" in str(error)  # noqa: PT017
                is_written = False
        found = C.find_latest(root)
        assert found is not None
        assert found.name == (f"step_00000{step}" if is_written else "step_000001")
        C.verify(found)
        old = C.load_tensors(found, "policy_optimizer")["mean"].tolist() == [7, 7, 7]
        assert old == (not is_written)
        if tried() <= number:
            break
    assert number > 15  # there were as many moments


INTERRUPTED = """
import sys, time
from pathlib import Path
from rlinf_embodied.learning import checkpoint_writer
from rlinf_embodied.learning.checkpoint_writer import CheckpointWriter

seal = checkpoint_writer._seal
checkpoint_writer._seal = lambda *arguments: (time.sleep(1), seal(*arguments))
CheckpointWriter().save(Path(sys.argv[1]), 1, policy_writer=lambda folder: None, tensors={}, state={"iteration": 1})
raise KeyboardInterrupt
"""


def test_a_process_that_is_interrupted_ends_when_its_checkpoint_is_on_the_disk(tmp_path) -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path)], capture_output=True, check=False)
    assert ended.stderr.splitlines()[-1] == b"KeyboardInterrupt"
    assert C.verify(tmp_path / "step_000001").step == 1
