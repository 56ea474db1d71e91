"""The set-up of rendering decides by distribution, and never claims what does not work."""

import sys
from pathlib import Path

import pytest

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


def test_the_mirror_is_the_one_that_the_machine_uses(setup_vulkan, apt_root):
    assert setup_vulkan.find_mirror(apt_root) is None
    (apt_root / "sources.list").write_text("# deb http://no.example/debian bookworm main\n")
    assert setup_vulkan.find_mirror(apt_root) is None
    (apt_root / "sources.list.d" / "debian.sources").write_text(DEBIAN_SOURCES)
    assert setup_vulkan.find_mirror(apt_root) == "http://mirror.example/debian"
    (apt_root / "sources.list").write_text("deb [arch=amd64] http://first.example/debian bookworm main\n")
    assert setup_vulkan.find_mirror(apt_root) == "http://first.example/debian"


def test_debian_12_takes_the_backport_for_this_call_only(setup_vulkan, apt_root, tmp_path):
    (apt_root / "sources.list.d" / "debian.sources").write_text(DEBIAN_SOURCES)
    (apt_root / "sources.list.d" / "other.list").write_text("deb http://broken.example any main\n")
    before = sorted(path.name for path in (apt_root / "sources.list.d").iterdir())
    sources = tmp_path / "temporary"
    sources.mkdir()
    update, install = setup_vulkan.install_commands(setup_vulkan.System("debian", 12), sources, apt_root)
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
def test_other_systems_are_left_to_a_person(setup_vulkan, apt_root, name, version):
    assert setup_vulkan.install_commands(setup_vulkan.System(name, version), apt_root, apt_root) is None
    assert "setup/vulkan.py" in setup_vulkan.manual_instructions(setup_vulkan.System(name, version))


def test_without_root_it_stops_with_the_command_to_run(setup_vulkan, monkeypatch, capsys):
    broken = setup_vulkan.Rendering(False, "", "no device")
    monkeypatch.setattr(setup_vulkan, "probe_rendering", lambda picture=False: broken)
    monkeypatch.setattr(setup_vulkan, "read_system", lambda: setup_vulkan.System("debian", 12))
    monkeypatch.setattr(setup_vulkan, "install", lambda *_: pytest.fail("it must not install"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert setup_vulkan.make_render(setup_vulkan.Options()) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: installing software Vulkan needs root")
    assert f"sudo {sys.executable} " in err


def test_a_machine_without_drivers_is_found_out(setup_vulkan, monkeypatch):
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):  # the loader's two ways to be told where drivers are
        monkeypatch.setenv(name, "/nowhere.json")
    found = setup_vulkan.probe_rendering()
    assert not found.works
    assert found.output
