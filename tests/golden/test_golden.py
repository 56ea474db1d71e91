"""The digests in the repository are this machine's; what differs is named by its first stage."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from tests.golden import check as script
from tests.golden.recipes import RECIPES


def test_clone_and_language_model_have_the_bits_of_the_repository(capsys) -> None:
    assert script.check(script.Options(recipe="clone,language")) == 0, capsys.readouterr()


@pytest.mark.sim
def test_physics_and_images_have_the_bits_of_the_repository_as_the_command_finds_them() -> None:
    command = [sys.executable, "-m", "tests.golden.check", "recipe=pick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_disturbed_stage_is_named(capsys) -> None:
    assert script.check(script.Options(recipe="clone", disturb="clone/features")) == 1
    assert "clone: the first stage that differs is 'features'" in capsys.readouterr().out


def test_the_first_of_several_is_named() -> None:
    expected = {"images": "a", "features": "b", "weights": "c"}
    assert script.first_difference(expected, expected) is None
    assert script.first_difference({**expected, "weights": "x", "features": "y"}, expected) == "features"
    assert script.first_difference({"images": "a"}, expected) == "features"
    assert script.first_difference({**expected, "more": "d"}, expected) == "more"


def test_files_hold_every_recipe() -> None:
    assert tuple(RECIPES) == script.NAMES
    for name in RECIPES:
        assert len(json.loads((script.FOLDER / f"{name}.json").read_text())) > 5
