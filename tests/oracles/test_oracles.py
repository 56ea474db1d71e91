"""The comparison with the reference's goldens: it passes on the oracles of the repository and notices what is off."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file, save_file

from rlinf_embodied.errors import DataError
from tests.oracles.folders import check_folders, expand
from tests.oracles.goldens import Difference, relative

ORACLES = REPOSITORY / "tests" / "oracles" / "openvla"
LIMIT = 1e-4


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def copied(name: str, into: Path) -> Path:
    shutil.copytree(ORACLES / name, into / name)
    return into / name


@pytest.mark.parametrize(
    ("name", "goldens"),
    [
        ("openvla", ["case1.projected_patches", "case1.action_tokens", "case1.actions_f64", "tok.encode_ids"]),
        ("openvla_oft_l1", ["case0.actions_normalized", "film.case0.actions_f64", "case0.proprio_normalized_f64"]),
        ("openvla_oft_discrete", ["rlinf.logprobs_T1.6_top-1", "rlinf.greedy_tokens", "simplevla.logprobs_T1.6"]),
    ],
)
def test_the_networks_give_the_goldens(capsys, name, goldens):
    assert check_folders(ORACLES / name, LIMIT) == 0
    said = capsys.readouterr().out
    for golden in goldens:
        assert f"  {golden} " in said
    assert "not compared" not in said


def test_a_golden_that_differs_is_named(tmp_path, capsys):
    folder = copied("openvla", tmp_path)
    path = folder / "golden" / "golden.safetensors"
    tensors = load_file(path)
    tensors["case1.projected_patches"] *= 1.001
    tensors["case1.action_tokens"][3] += 1
    save_file(tensors, path)
    assert check_folders(folder, LIMIT) == 1
    wrong = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "TOO LARGE" in line]
    assert wrong == ["case1.projected_patches", "case1.action_tokens"]
    assert check_folders(folder, 0.01) == 1  # tokens must be equal at any limit


def test_weights_that_differ_are_noticed(tmp_path):
    folder = tmp_path / "full"
    expand(ORACLES / "openvla", folder)
    path = folder / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["vision_backbone.fused_featurizer.blocks.1.mlp.fc1.bias"] += 0.05
    save_file(tensors, path, metadata={"format": "pt"})
    assert check_folders(folder, LIMIT) == 1


def test_a_folder_without_an_oracle_is_refused(tmp_path):
    with pytest.raises(DataError, match="which holds neither checkpoint/ and golden/ nor"):
        check_folders(tmp_path, LIMIT)


def test_differences_are_of_the_largest_golden_and_infinities_must_agree():
    golden = torch.tensor([2.0, -4.0, 1.0])
    assert relative(golden + torch.tensor([0.0, 0.0, 0.4]), golden) == pytest.approx(0.1)
    masked = torch.tensor([1.0, -torch.inf])
    assert relative(masked, masked) == 0
    assert relative(torch.tensor([1.0, -50.0]), masked) == float("inf")
    assert Difference("a", float("nan"), 1.0).too_large
