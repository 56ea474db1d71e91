"""Installs LIBERO into an environment of its own, .venv-libero, whose versions do not fit those of runs.

`python -m experiments.setup.libero` installs the versions of experiments/setup/libero.txt, and Mesa's off-screen
renderer where there is none and it may (root on Debian or Ubuntu); then it builds a task and renders an image.  What
is there already is left alone, and a set-up that was interrupted goes on.  The tasks, their initial states and all
meshes and textures are in the packages.  RLINF_EMBODIED_LIBERO names another folder than .venv-libero.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_suffix(".txt")
PYTHON = (3, 11)  # the newest one that MuJoCo 2.3.7 has wheels for
OSMESA = "libosmesa6"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# All pins are given, so nothing is resolved; one package comes as source and is built with the setuptools of the pins.
INSTALL = (*PIP, "install", "--no-deps", "--no-compile", "--no-build-isolation", "--progress-bar", "off")
CHECK = """
from envs.libero.scene import Scene, tasks_of
from envs.libero.starts import Start
scene = Scene(tasks_of("libero_spatial")[0], settle_steps=1)
scene.begin(Start(0, 0, 0))
image = scene.image(scene.open_eye(), "agentview", 64)
assert image.shape == (64, 64, 3) and image.std() > 1, image.std()
print(scene.task.instruction)
"""


def find_python() -> str | None:
    """Returns a Python of the right version: the one that runs this, or one on the PATH."""
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    name = shutil.which(f"python{PYTHON[0]}.{PYTHON[1]}")
    works = name and subprocess.run([name, "-c", "import venv, ensurepip"], check=False, capture_output=True)
    return name if works and works.returncode == 0 else None


def split_pins(text: str) -> tuple[list[str], list[str]]:
    """Returns the pins that others are built with, and the others, in the order of the file."""
    pins = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    first = [pin for pin in pins if pin.split("==")[0] in ("setuptools", "wheel")]
    return first, [pin for pin in pins if pin not in first]


def install_packages(folder: Path) -> None:
    """Makes the environment and installs what is missing.

    Raises:
        subprocess.CalledProcessError: a command failed, and has said why.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        found = find_python()
        if found is None:
            raise SystemExit(
                f"error: LIBERO's environment needs Python {PYTHON[0]}.{PYTHON[1]}, for which its MuJoCo has wheels, "
                "and there is none on the PATH: install it (Debian 12: apt-get install python3.11-venv), or run this "
                "command with it"
            )
        subprocess.run([found, "-m", "venv", str(folder)], check=True)
    for pins in split_pins(PINS.read_text()):
        subprocess.run([str(python), *INSTALL, *pins], check=True)


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


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds a task and renders it, with what was installed."""
    environment = {"MUJOCO_GL": "osmesa", **os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [str(folder / "bin" / "python"), "-P", "-c", CHECK]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    """Returns the exit code."""
    folder = Path(os.environ.get("RLINF_EMBODIED_LIBERO") or REPOSITORY / ".venv-libero").absolute()
    print(f"set-up of {folder}: 2 GB on disk where nothing is there yet", flush=True)
    try:
        install_packages(folder)
    except subprocess.CalledProcessError as error:
        print(
            f"error: {' '.join(map(str, error.cmd[:6]))} ... failed: see above; the same command goes on",
            file=sys.stderr,
        )
        return 1
    missing = install_renderer()
    done = check(folder)
    if done.returncode != 0:
        words = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        print(f"error: LIBERO cannot build and render a task:\n{words}", file=sys.stderr)
        if missing:
            print(f"error: there is no off-screen renderer: {missing}", file=sys.stderr)
        return 1
    print(f"LIBERO: built and rendered {done.stdout.strip().splitlines()[-1]!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
