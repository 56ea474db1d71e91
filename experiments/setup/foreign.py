"""Installs a simulator into an environment of its own: its versions do not fit those of runs."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from envs.foreign.place import REPOSITORY, Place

OSMESA = "libosmesa6"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# All pins are given, so nothing is resolved; what comes as source is built with the setuptools of the pins.
INSTALL = (*PIP, "install", "--no-deps", "--no-compile", "--no-build-isolation", "--progress-bar", "off")


@dataclass(frozen=True, slots=True)
class Installation:
    """What one simulator needs."""

    place: Place
    pins: Path  # a text file of versions
    check: str  # code that runs with what was installed, and prints what it did
    disk: str  # how much it takes, in words
    renderer: bool = True  # whether it draws with MuJoCo
    python: tuple[int, int] | None = None  # the version that it needs; None: that of runs

    @property
    def folder(self) -> Path:
        return self.place.folder()

    def find_python(self) -> str | None:
        """Returns a Python of the right version: the one that runs this, or one on the PATH."""
        if self.python is None or sys.version_info[:2] == self.python:
            return sys.executable
        name = shutil.which(f"python{self.python[0]}.{self.python[1]}")
        works = name and subprocess.run([name, "-c", "import venv, ensurepip"], check=False, capture_output=True)
        return name if works and works.returncode == 0 else None

    def install_packages(self, folder: Path) -> None:
        """Makes the environment and installs what is missing.

        Raises:
            subprocess.CalledProcessError: a command failed, and has said why.
        """
        python = folder / "bin" / "python"
        if not python.exists():
            found = self.find_python()
            if found is None:
                version = ".".join(map(str, self.python or ()))
                raise SystemExit(
                    f"error: {self.place.simulator}'s environment needs Python {version}, for which its MuJoCo has "
                    f"wheels, and there is none on the PATH: install it (Debian 12: apt-get install python{version}-"
                    "venv), or run this command with it"
                )
            subprocess.run([found, "-m", "venv", str(folder)], check=True)
        for pins in split_pins(self.pins.read_text()):
            if pins:
                subprocess.run([str(python), *INSTALL, *pins], check=True)

    def run_check(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Runs the simulator, with what was installed."""
        environment = {"MUJOCO_GL": "osmesa", **os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [str(folder / "bin" / "python"), "-P", "-c", self.check]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def main(self) -> int:
        """Installs and checks; returns the exit code."""
        name, folder = self.place.simulator, self.folder
        print(f"set-up of {folder}: {self.disk} on disk where nothing is there yet", flush=True)
        try:
            self.install_packages(folder)
        except subprocess.CalledProcessError as error:
            print(
                f"error: {' '.join(map(str, error.cmd[:6]))} ... failed: see above; the same command goes on",
                file=sys.stderr,
            )
            return 1
        missing = install_renderer() if self.renderer else ""
        done = self.run_check(folder)
        if done.returncode != 0:
            words = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
            print(f"error: {name} cannot build and render a task:\n{words}", file=sys.stderr)
            if missing:
                print(f"error: there is no off-screen renderer: {missing}", file=sys.stderr)
            return 1
        print(f"{name}: built and rendered {done.stdout.strip().splitlines()[-1]!r}")
        return 0


def split_pins(text: str) -> tuple[list[str], list[str]]:
    """Returns the pins that others are built with, and the others, in the order of the file."""
    pins = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    first = [pin for pin in pins if pin.split("==")[0] in ("setuptools", "wheel")]
    return first, [pin for pin in pins if pin not in first]


def install_renderer() -> str:
    """Installs OSMesa where it is missing and may be; returns what is left to do, "" if nothing is."""
    if ctypes.util.find_library("OSMesa") or os.environ.get("MUJOCO_GL"):
        return ""
    manual = f"apt-get install {OSMESA} as root, or set MUJOCO_GL=egl where a GPU's driver renders"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return manual
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ("-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")
    subprocess.run(["apt-get", *options, "update", "-q"], env=quiet, check=False)
    install = ["apt-get", *options, "install", "-y", "-q", "--no-install-recommends", OSMESA]
    return "" if subprocess.run(install, env=quiet, check=False).returncode == 0 else manual
