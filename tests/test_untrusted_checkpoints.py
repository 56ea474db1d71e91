"""A checkpoint from anywhere may be read: nothing in it is run."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from runs import clone, tiny

from policies.openvla.folder import _read_side_file
from rlinf_embodied.embodied.policy_folder import load_policy
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.plug_ins import load_plug_in, load_target
from rlinf_embodied.training.resume import saved_progress

PACKAGES = ("rlinf_embodied", "envs", "policies", "experiments")
FOREIGN = "policies/sb3.py"  # reads what Stable-Baselines3 writes, which is a pickle; only policy=sb3 asks for it
UNSAFE = {("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("yaml", "load"), ("yaml", "unsafe_load")}
NEEDS = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def resealed(path: Path) -> Path:
    """Makes manifest and seal fit what a checkpoint holds now: its author wanted it so."""
    checkpoint._seal(path, 3, 1)
    return path


def unsafe_calls(file: Path) -> list[str]:
    """Returns the calls of a module that may unpickle."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            name = (node.func.value.id, node.func.attr)
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            keyword, value = NEEDS.get(name, ("", None))
            default = False if name == ("np", "load") else None  # numpy's own
            if name in UNSAFE or (keyword and given.get(keyword, default) is not value):
                found.append(f"{file}:{node.lineno} {'.'.join(name)}")
    return found


def test_no_module_unpickles_files() -> None:
    files = [file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")]
    assert len(files) > 200
    found = [call for file in files for call in unsafe_calls(file) if FOREIGN not in call]
    assert found == []


def test_the_search_for_unsafe_calls_finds_them(tmp_path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "torch.load(a)\ntorch.load(a, weights_only=False)\npickle.loads(a)\nnp.load(a, allow_pickle=True)\n"
    )
    assert [call.rpartition(" ")[2] for call in unsafe_calls(file)] == ["torch.load"] * 2 + ["pickle.loads", "np.load"]
    file.write_text("torch.load(a, weights_only=True)\nnp.load(a)\n")
    assert unsafe_calls(file) == []


def test_a_pickle_proves_itself_where_it_is_loaded(tmp_path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "training_state/policy_optimizer.safetensors"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
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
    with pytest.raises(CheckpointError, match=r"holds no usable policy|is damaged \(training_state"):
        load_policy(tiny().policy, str(path), "cpu") if of_policy else checkpoint.load_tensors(path, "policy_optimizer")
    assert not (tmp_path / "proof").exists()


def test_a_pickle_in_the_place_of_a_published_policys_side_file_is_refused_and_not_run(tmp_path) -> None:
    torch.save({"weight": Bomb(tmp_path / "proof")}, tmp_path / "action_head--5_checkpoint.pt")
    with pytest.raises(CheckpointError, match=r"(?s)action_head--5_checkpoint.pt cannot be read .*copy it again"):
        _read_side_file(tmp_path, "action_head", "")
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
        (path / "COMPLETE").unlink()


@pytest.mark.parametrize("target", ["os.system", "builtins.exec", "subprocess.run"])
def test_what_a_file_names_cannot_be_a_function_of_python_itself(target: str) -> None:
    with pytest.raises(ConfigError, match="nothing of Python's own library is a plug-in"):
        load_target(target)
    with pytest.raises(ConfigError, match="nothing of Python's own library is a plug-in"):
        load_plug_in(target, "workload.workflow", "work")
