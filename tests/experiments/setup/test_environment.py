"""The set-up of the environment: pins, what is missing, what fails."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from experiments.setup import environment

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
