"""The set-up of the environment: what each pip is told, what a person sees meanwhile, and what a failure says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[3]
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()

PIP_OUTPUT = """Obtaining file:///a folder/project
Collecting torch==2.14.1
  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (554.6 MB)
Collecting nvidia-cudnn-cu13==9.24.0.43
  Downloading nvidia_cudnn_cu13-9.24.0.43-py3-none-manylinux_2_27_x86_64.whl (553.1 MB)
"""


@pytest.fixture
def lane(setup_environment, tmp_path, monkeypatch):
    """Makes a lane of Python commands, whose log lies in a folder of the test."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    def make(name: str, *codes: str, **options):
        return setup_environment.Lane(name, [[sys.executable, "-c", code] for code in codes], **options)

    return make


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


def install(site: Path, name: str, version: str, size: int = 10, finished: bool = True) -> Path:
    """Writes what pip leaves of a package."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    rows = [f"{name}.py,sha256=abc,{size}", f"{info.name}/RECORD,,"]
    if finished:
        (info / "INSTALLER").write_text("pip\n")
        rows.append(f"{info.name}/INSTALLER,sha256=def,4")
    (info / "RECORD").write_text("\n".join(rows))
    return info


@pytest.mark.parametrize(("dev", "sections"), [(False, {"run"}), (True, {"run", "dev"})])
def test_the_sections_name_every_package_that_is_needed(setup_environment, dev, sections):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else [])
    pinned = {pin.split("==")[0] for pin in setup_environment.read_pins(CONSTRAINTS, sections)}
    assert sorted(needed(wanted) - pinned) == []  # pip is told not to look for dependencies
    if sys.version_info[:2] == (3, 11):  # what the versions were chosen with; another Python may need less
        assert sorted(pinned - needed(wanted)) == []


def test_a_pin_is_read_below_its_heading_and_spelled_in_one_way(setup_environment):
    text = "# all\nnothing==0\n# [run] a\nStable_Baselines3==2.9.2\n# a note\nray==2.60.0\n# [dev] b\nruff==0.17.5\n"
    assert setup_environment.read_pins(text, {"run"}) == ["stable-baselines3==2.9.2", "ray==2.60.0"]
    assert setup_environment.read_pins(text, {"dev"}) == ["ruff==0.17.5"]
    assert setup_environment.read_pins(text, {"other"}) == []


def test_every_pin_goes_to_one_lane_and_setuptools_comes_before_what_is_built(setup_environment):
    pins = setup_environment.read_pins(CONSTRAINTS, {"run", "dev"})
    first, torch, one, two = setup_environment.split_pins(pins)
    assert sorted([*first, *torch, *one, *two]) == sorted(pins)
    assert len({*first, *torch, *one, *two}) == len(pins)
    assert [pin.split("==")[0] for pin in first] == ["setuptools"]
    assert {pin.split("-")[0].split("==")[0] for pin in torch} == {"torch", "triton", "nvidia", "cuda"}
    assert abs(len(one) - len(two)) <= 1
    lanes = {lane.name: lane.commands for lane in setup_environment.install_lanes(pins)}
    built = [pin for pin in pins if pin.startswith("antlr4-python3-runtime==")]
    assert first[0] in lanes["two"][0]
    assert [pin for pin in built if pin not in lanes["two"][1]] == []  # not beside setuptools, in another pip
    assert "--editable" in lanes["two"][1]
    assert not any("--editable" in command for command in [*lanes["torch"], *lanes["one"]])


def test_where_all_is_there_only_the_project_is_installed(setup_environment):
    lanes = setup_environment.install_lanes([])
    assert [lane.name for lane in lanes] == ["two", "vulkan"]
    assert lanes[0].commands[0][-2:] == ["--editable", str(REPOSITORY)]


def test_what_pip_prints_tells_how_far_it_is(setup_environment):
    fetched, read = setup_environment.Fetched, setup_environment.read_fetched
    assert read("", 3) == fetched(0, "")
    assert read(PIP_OUTPUT[: PIP_OUTPUT.index("  Down")], 3) == fetched(0, "torch 2.14.1")
    assert read(PIP_OUTPUT, 3) == fetched(1, "nvidia-cudnn-cu13 9.24.0.43 (553.1 MB)")
    assert read(PIP_OUTPUT + "Installing collected packages: torch\n", 3) == fetched(3, "")
    first = "Collecting setuptools==84.2.1\nInstalling collected packages: setuptools\n"
    assert read(first + "Collecting ray==2.60.0\n", 3) == fetched(1, "ray 2.60.0")  # the lane's second pip


def test_the_line_of_progress(setup_environment):
    fetched = [setup_environment.Fetched(20, ""), setup_environment.Fetched(76, "ray 2.60.0 (79.3 MB)")]
    assert setup_environment.progress_line(34.4, 147, fetched, 41, 2_100_000_000) == (
        "set-up 34 s: of 147 packages 96 are here, 41 installed (2.1 GB); loading ray 2.60.0 (79.3 MB)"
    )
    assert (
        setup_environment.progress_line(5, 1, [], 0, 0) == "set-up 5 s: of 1 packages 0 are here, 0 installed (0.0 GB)"
    )


def test_a_log_gets_a_line_every_ten_seconds_and_a_terminal_one_line(setup_environment, monkeypatch, capsys):
    progress = setup_environment.Progress()
    for second in range(1, 25):
        monkeypatch.setattr(progress, "seconds", lambda second=second: float(second))
        progress.show(f"second {second}")
    assert capsys.readouterr().out == "second 10\nsecond 20\n"
    progress.terminal = True
    progress.show("a" * 10_000)
    progress.show("short")
    progress.clear()
    out = capsys.readouterr().out
    assert "\n" not in out
    assert len(out) < 1_000
    assert out.endswith("\r\x1b[Kshort\r\x1b[K")


def test_only_wholly_installed_packages_count(setup_environment, tmp_path):
    install(tmp_path, "hydra_core", "1.3.8", size=100)
    install(tmp_path, "torch", "2.14.1", finished=False)
    (tmp_path / "ray-2.60.0.dist-info").mkdir()
    assert setup_environment.finished_packages(tmp_path) == {"hydra-core==1.3.8": 104}
    pins = ["hydra-core==1.3.8", "torch==2.14.1", "ray==2.60.0"]
    install(tmp_path, "of_somebody_else", "1.0", finished=False)
    removed = setup_environment.remove_unfinished(tmp_path, pins)
    assert sorted(removed) == ["ray-2.60.0.dist-info", "torch-2.14.1.dist-info"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hydra_core-1.3.8.dist-info",
        "of_somebody_else-1.0.dist-info",
    ]


def test_the_commands_of_a_lane_run_in_turn_and_byte_code_is_kept(setup_environment, lane, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(setup_environment, "POLL_S", 0.01)
    said = "import os; print('{}', os.environ.get('PYTHONDONTWRITEBYTECODE'))"
    lanes = [lane("a", said.format("first"), said.format("second"))]
    assert setup_environment.run(lanes, setup_environment.Progress(), lambda: "") is None
    assert (tmp_path / "setup_a.log").read_text() == "first None\nsecond None\n"


def test_a_failure_ends_the_other_lanes_at_once(setup_environment, lane, tmp_path, monkeypatch):
    monkeypatch.setattr(setup_environment, "POLL_S", 0.01)
    broken = lane("broken", "print('ERROR: No matching distribution found for x==1'); raise SystemExit(1)", "print(2)")
    slow = lane("slow", "import time; time.sleep(600)")
    failed = setup_environment.run([slow, broken], setup_environment.Progress(), lambda: "")
    assert failed is broken
    assert slow.process.poll() is not None
    assert "2" not in (tmp_path / "setup_broken.log").read_text().splitlines()
    assert setup_environment.last_words(broken.log) == "  ERROR: No matching distribution found for x==1"


def test_a_lane_that_may_fail_does_not_fail_the_set_up(setup_environment, lane, monkeypatch):
    monkeypatch.setattr(setup_environment, "POLL_S", 0.01)
    lanes = [lane("vulkan", "raise SystemExit(1)", must_succeed=False), lane("a", "print(1)")]
    assert setup_environment.run(lanes, setup_environment.Progress(), lambda: "") is None


def test_a_failure_is_told_with_its_lane_and_exit_code(setup_environment, lane, tmp_path, monkeypatch, capsys):
    failed = lane("torch")
    failed.log = tmp_path / "setup_torch.log"
    failed.log.write_text(
        "Collecting torch==2.14.1\nERROR: Could not find a version\nERROR: No matching distribution\n"
    )
    monkeypatch.setattr(setup_environment, "set_up", lambda dev, progress: (3, failed))
    monkeypatch.setattr(setup_environment.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["environment"])
    assert setup_environment.main() == 1
    err = capsys.readouterr().err
    assert err.startswith(
        f"error: set-up failed in torch (all of it: {failed.log}):\n  ERROR: Could not find a version\n"
    )


def test_outside_of_a_virtual_environment_nothing_is_touched(setup_environment, monkeypatch, capsys):
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(sys, "argv", ["environment"])
    monkeypatch.setattr(setup_environment, "set_up", lambda *_: pytest.fail("it must not install"))
    assert setup_environment.main() == 1
    assert "no virtual environment" in capsys.readouterr().err


def test_the_script_needs_nothing_but_the_standard_library():
    script = REPOSITORY / "experiments" / "setup" / "environment.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--dev" in done.stdout
