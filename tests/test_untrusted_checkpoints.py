"""A checkpoint from anywhere may be read: nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from runs import clone, tiny

from policies.openvla.folder import _load_part
from rlinf_embodied.embodied.policy_folder import load_policy
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.plug_ins import load_plug_in, load_target
from rlinf_embodied.training.resume import saved_progress

PACKAGES = ("rlinf_embodied", "envs", "policies", "experiments")
FOREIGN = "policies/sb3.py"  # reads what Stable-Baselines3 writes, which is a pickle; only policy=sb3 asks for it
UNSAFE = re.compile(
    r"pickle\.(loads?|Unpickler)\(|yaml\.(unsafe_)?load\(|allow_pickle=True|torch\.load\((?!.*weights_only=True)"
)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def test_no_module_unpickles_files() -> None:
    files = [file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")]
    found = [(file, line) for file in files for line in file.read_text("utf-8").splitlines() if UNSAFE.search(line)]
    assert [line for file, line in found if FOREIGN not in str(file)] == []
    assert found, "the one that reads pickles is found"


def resealed(path: Path) -> Path:
    """Makes manifest and seal fit what a checkpoint holds now: its author wanted it so."""
    checkpoint._seal(path, 3, 1)
    return path


@pytest.mark.parametrize(
    ("name", "form"), [("model.safetensors", "pickle"), ("training_state/policy_optimizer.safetensors", "torch")]
)
def test_a_pickle_in_the_place_of_tensors_is_refused_and_not_run(tmp_path, name: str, form: str) -> None:
    path = tmp_path / "step_000003"
    shutil.copytree(clone(tiny()), path)
    (path / "training_state").mkdir()
    (path / "state.json").write_text("{}")
    bomb = Bomb(tmp_path / "proof")
    if form == "pickle":
        (path / name).write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"mean": bomb}, path / name)
    resealed(path)
    assert checkpoint.verify(path).step == 3
    of_policy = name == "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read|is damaged \(training_state"):
        load_policy(tiny().policy, str(path), "cpu") if of_policy else checkpoint.load_tensors(path, "policy_optimizer")
    assert not (tmp_path / "proof").exists()


def test_a_pickle_in_the_place_of_a_published_policys_side_file_is_refused_and_not_run(tmp_path) -> None:
    torch.save({"weight": Bomb(tmp_path / "proof")}, tmp_path / "action_head--5_checkpoint.pt")
    with pytest.raises(CheckpointError, match=r"(?s)action_head--5_checkpoint.pt cannot be read .*copy it again"):
        _load_part(torch.nn.Linear(1, 1), "action_head", tmp_path, torch.float32, may_lack=False)
    assert not (tmp_path / "proof").exists()


def test_the_state_of_another_version_says_so(tmp_path) -> None:
    path = tmp_path / "step_000003"
    (path / "training_state").mkdir(parents=True)
    for state in ({}, {"progress": 3}, {"progress": {"of_the_future": 1}}):
        (path / "state.json").write_text(json.dumps(state))
        resealed(path)
        with pytest.raises(CheckpointError, match=r"state.json has a progress that cannot be read .*the version"):
            saved_progress(path)
        (path / "manifest.json").unlink()


@pytest.mark.parametrize("target", ["os.system", "builtins.exec", "subprocess.run"])
def test_what_a_file_names_cannot_be_a_function_of_python_itself(target: str) -> None:
    with pytest.raises(ConfigError, match="nothing of Python's own library is a plug-in"):
        load_target(target)
    with pytest.raises(ConfigError, match="nothing of Python's own library is a plug-in"):
        load_plug_in(target, "workload.workflow", "work")
