"""Set-up says where PhysX's library for GPUs belongs, where there is a GPU to use it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def setup() -> ModuleType:
    return importlib.import_module("experiments.setup.gpu_physics")


def test_the_library_s_place_is_said_where_a_gpu_lacks_it(setup, monkeypatch, tmp_path, capsys) -> None:
    place = tmp_path / "libPhysXGpu_64.so"
    monkeypatch.setattr(setup, "library", lambda: place)
    monkeypatch.setattr(setup, "has_gpu", lambda: False)
    assert setup.main() == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(setup, "has_gpu", lambda: True)
    assert setup.main() == 0
    assert f"{place} is missing" in (said := capsys.readouterr().out)
    assert "without network: on a machine with network take" in said
    place.touch()
    assert setup.main() == 0
    assert capsys.readouterr().out == ""
