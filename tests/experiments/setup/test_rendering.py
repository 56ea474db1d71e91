"""The set-up of rendering decides by distribution, and never claims what does not work."""

import sys
from pathlib import Path

import pytest

from experiments.setup import rendering

DEBIAN_SOURCES = """Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main
"""


@pytest.fixture
def apt_root(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_the_mirror_is_the_one_that_the_machine_uses(apt_root):
    assert rendering.find_mirror(apt_root) is None
    (apt_root / "sources.list").write_text("# deb http://no.example/debian bookworm main\n")
    assert rendering.find_mirror(apt_root) is None
    (apt_root / "sources.list.d" / "debian.sources").write_text(DEBIAN_SOURCES)
    assert rendering.find_mirror(apt_root) == "http://mirror.example/debian"
    (apt_root / "sources.list").write_text("deb [arch=amd64] http://first.example/debian bookworm main\n")
    assert rendering.find_mirror(apt_root) == "http://first.example/debian"


def test_debian_12_takes_the_backport_for_this_call_only(apt_root, tmp_path):
    (apt_root / "sources.list.d" / "debian.sources").write_text(DEBIAN_SOURCES)
    (apt_root / "sources.list.d" / "other.list").write_text("deb http://broken.example any main\n")
    before = sorted(path.name for path in (apt_root / "sources.list.d").iterdir())
    sources = tmp_path / "temporary"
    sources.mkdir()
    update, install = rendering.install_commands(rendering.System("debian", 12), rendering.VULKAN, sources, apt_root)
    assert f"Dir::Etc::sourceparts={sources}" in update
    assert f"Dir::Etc::sourceparts={sources}" in install
    assert install[install.index("-t") + 1] == "bookworm-backports"
    assert "mesa-vulkan-drivers" in install
    line = (sources / "backports.list").read_text()
    assert "http://mirror.example/debian bookworm-backports main" in line
    assert (sources / "debian.sources").read_text() == DEBIAN_SOURCES
    assert not (sources / "other.list").exists()  # an unrelated source cannot spoil the update
    assert sorted(path.name for path in (apt_root / "sources.list.d").iterdir()) == before


@pytest.mark.parametrize(("name", "version"), [("ubuntu", 20), ("debian", 11), ("fedora", 41), ("unknown", 0)])
def test_other_systems_are_left_to_a_person(apt_root, name, version):
    assert rendering.install_commands(rendering.System(name, version), ["libegl1"], apt_root, apt_root) is None
    assert "setup/rendering.py" in rendering.manual_instructions(rendering.System(name, version))


@pytest.mark.parametrize("works", [False, True])
def test_without_root_it_says_what_is_missing_and_stops_if_vulkan_is(monkeypatch, capsys, works):
    monkeypatch.setattr(rendering, "probe_rendering", lambda picture=False: ("", "" if works else "no device"))
    monkeypatch.setattr(rendering, "has_opengl", lambda: not works)
    monkeypatch.setattr(rendering, "read_system", lambda: rendering.System("debian", 12))
    monkeypatch.setattr(rendering, "install", lambda *_: pytest.fail("it must not install"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert rendering.make_render(rendering.Options()) == int(not works)
    err = capsys.readouterr().err
    missing = "libegl1" if works else "mesa-vulkan-drivers libvulkan1"
    assert err.startswith(f"error: {missing} needs root to be installed")
    assert f"sudo {sys.executable} " in err


def test_what_is_missing_alone_is_installed(monkeypatch):
    installed = []
    monkeypatch.setattr(rendering, "probe_rendering", lambda picture=False: ("gpu", ""))
    monkeypatch.setattr(rendering, "has_opengl", lambda: False)
    monkeypatch.setattr(rendering, "install", lambda _, packages, dry: not installed.extend(packages))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert rendering.make_render(rendering.Options()) == 0
    assert installed == ["libegl1"]


def test_a_machine_without_drivers_is_found_out(monkeypatch):
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):  # the loader's two ways to be told where drivers are
        monkeypatch.setenv(name, "/nowhere.json")
    device, why = rendering.probe_rendering()
    assert not device
    assert why
