from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_embodied.cache import cached
from rlinf_embodied.errors import CheckpointError, CheckpointWriteError
from rlinf_embodied.learning import checkpoint as C

STATE = {"iteration": 10, "success": 0.5, "nested": {"names": ["a", "b"], "none": None}}


def write_policy(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.arange(3.0)}, folder / "model.safetensors")


def save(root: Path, step: int, keep: int = 3, writer: Callable[[Path], None] = write_policy, size: int = 5) -> Path:
    moments = {"mean": torch.full((size,), float(step)), "steps": torch.tensor([step])}
    tensors = {"policy_optimizer": moments, "carry_over": {}}
    C.save(root, step, policy_writer=writer, tensors=tensors, state=STATE | {"iteration": step}, keep=keep)
    return root / f"step_{step:06d}"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_comes_back_and_the_folder_loads_like_a_policy(tmp_path):
    path = save(tmp_path, 10)
    assert path == tmp_path / "step_000010"
    assert C.load_state(path) == STATE
    tensors = C.load_tensors(path, "policy_optimizer")
    assert tensors["mean"].tolist() == [10.0] * 5
    assert tensors["steps"].dtype == torch.int64
    assert C.load_tensors(path, "carry_over") == C.load_tensors(path, "value_optimizer") == {}
    assert load_file(path / "model.safetensors")["w"].tolist() == [0, 1, 2]
    assert C.verify(path).step == 10


def test_newest_is_what_was_written_last_whatever_its_step_and_only_k_are_kept(tmp_path):
    # someone resumed from step 2 and wrote step 3 again: step 9 belongs to another history
    for step in (1, 2, 9, 3):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step_000003", "step_000009"]
    assert (tmp_path / "latest").resolve() == C.find_latest(tmp_path) == tmp_path / "step_000003"
    assert C.load_state(tmp_path / "latest")["iteration"] == 3


def test_a_checkpoint_of_the_same_step_is_replaced_and_what_a_killed_writer_left_cleared(tmp_path):
    save(tmp_path, 5, size=4)
    (tmp_path / ".step_000002.partial").mkdir()
    save(tmp_path, 5, size=7)
    assert names(tmp_path) == ["latest", "step_000005"]
    assert len(C.load_tensors(tmp_path / "latest", "policy_optimizer")["mean"]) == 7


def test_without_checkpoints_there_is_no_latest(tmp_path):
    assert C.find_latest(tmp_path) is None
    assert C.find_latest(tmp_path / "nowhere") is None
    (tmp_path / "step_000001").mkdir()
    assert C.find_latest(tmp_path) is None


def break_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: break_byte(p / "model.safetensors"), "damaged .the checksum of model.safetensors differs"),
        (lambda p: break_byte(p / "training_state/policy_optimizer.safetensors"), "checksum of training_state/policy"),
        (lambda p: (p / "config.json").unlink(), "damaged .config.json is missing"),
        (lambda p: (p / "state.json").write_text("{}"), "checksum of state.json differs"),
        (lambda p: (p / "manifest.json").write_text("{}"), "has the format 'of no checkpoint'"),
        (lambda p: (p / "manifest.json").unlink(), "incomplete .manifest.json: No such file"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_harm_is_named_together_with_what_to_use_instead(tmp_path, harm, message):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    harm(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        C.verify(path)
    assert f"use step_000001 in {tmp_path}" in str(caught.value)


def test_files_get_the_modes_that_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
        cached(tmp_path / "clone", lambda aside: (aside.mkdir(), write_policy(aside)))
    finally:
        os.umask(before)
    found = [*path.rglob("*"), *(tmp_path / "clone").rglob("*")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in found if p.is_file()} == {0o640}


def test_what_another_process_made_meanwhile_stays_and_what_is_damaged_is_replaced(tmp_path):
    def made_by_others_first(aside: Path) -> None:
        aside.mkdir()
        write_policy(aside)
        (tmp_path / "clone").mkdir(exist_ok=True)
        write_policy(tmp_path / "clone")
        (tmp_path / "clone/theirs").touch()

    cached(tmp_path / "clone", made_by_others_first, "config.json")
    assert (tmp_path / "clone/theirs").exists()  # a run that reads it goes on reading
    (tmp_path / "clone/config.json").unlink()
    cached(tmp_path / "clone", lambda aside: (aside.mkdir(), write_policy(aside)), "config.json")
    assert sorted(path.name for path in (tmp_path / "clone").iterdir()) == ["config.json", "model.safetensors"]
    assert names(tmp_path) == ["clone"]


def test_folders_of_others_are_refused(tmp_path):
    write_policy(tmp_path)
    with pytest.raises(CheckpointError, match="not a training checkpoint of this project"):
        C.load_state(tmp_path)
    path = save(tmp_path / "root", 1)
    content = json.loads((path / "manifest.json").read_text()) | {"format": "rlinf_embodied checkpoint 99"}
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"format 'rlinf_embodied checkpoint 99'.*version that wrote it"):
        C.load_state(path)


def test_an_interrupt_while_writing_leaves_no_trace(tmp_path):
    def interrupted(folder: Path) -> None:
        write_policy(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, writer=interrupted)
    assert names(tmp_path) == []


WRITES: list[tuple[object, str]] = [
    *((C, name) for name in ("save_file", "sync")),
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
            if tried > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*arguments, **options)

        return write

    for place, name in WRITES:
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    return lambda: tried


def test_a_disk_that_is_full_from_any_moment_on_costs_the_new_checkpoint_only(tmp_path) -> None:
    for number in range(100):
        root = tmp_path / str(number)
        save(root, 1)
        with pytest.MonkeyPatch.context() as patch:
            tried = full_from(patch, number)
            try:
                save(root, 2)
                is_written = True
            except CheckpointWriteError as error:
                assert "older ones are untouched: free space" in str(error)  # noqa: PT017
                is_written = False
        found = C.find_latest(root)
        assert found is not None
        assert found.name == ("step_000002" if is_written else "step_000001")
        C.verify(found)
        if tried() <= number:
            break
    assert number > 15  # there were as many moments


def test_the_hash_of_weights_depends_on_names_types_shapes_and_bytes_but_not_on_order():
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    digest = C.weights_sha256(tensors)
    assert C.weights_sha256(dict(reversed(tensors.items()))) == digest
    assert C.weights_sha256({name: tensor.clone() for name, tensor in tensors.items()}) == digest
    others = [
        {"a": tensors["a"].reshape(2, 3), "b": tensors["b"]},
        {"a": tensors["a"].view(torch.int32), "b": tensors["b"]},
        {"c": tensors["a"], "b": tensors["b"]},
        {"a": torch.nextafter(tensors["a"], torch.tensor(9.0)), "b": tensors["b"]},
        {"a": tensors["a"]},
    ]
    assert len({digest, *map(C.weights_sha256, others)}) == 6
    assert C.weights_sha256({"t": torch.arange(6.0).reshape(2, 3).T}) == C.weights_sha256(
        {"t": torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])}
    )
