"""Installs a simulator, lerobot, vla-eval, vLLM or clients of agents into a separate virtual environment.

python -m experiments.setup.foreign env=<name>  agents, aloha, lerobot, libero, metaworld, pusht, so101, vla_eval, vllm

installs the versions of experiments/setup/<name>.txt into .venv-<name> (or the folder that the variable
RLINF_EMBODIED_<NAME> names), and an off-screen renderer where there is none and it may (root on Debian or
Ubuntu); then it builds a task of env=<name> and renders an image.  The same command resumes an interrupted set-up.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.foreign.adapter import folder_of
from experiments.setup.environment import INSTALL
from experiments.setup.rendering import OPENGL, has_opengl, install, manual_instructions, read_system
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import RlinfError
from rlinf_embodied.plug_ins import load_target


def pins_of(key: str) -> str:
    """Returns the text of experiments/setup/<key>.txt: versions, and comments that may name Python and a module.

    Raises:
        ConfigError: there is no such file.
    """
    known = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.txt"))}
    require(key in known, "env", key, f"it must be one of {', '.join(known)}", "name one")
    return known[key].read_text()


def find_python(key: str, pins: str) -> str:
    """Returns a Python of the version that the pins name ("# Python 3.11"): the one that runs this, or one on the PATH.

    Raises:
        SystemExit: there is none.
    """
    named = re.search(r"^#.*\bPython (\d+)\.(\d+)", pins, re.MULTILINE)
    if named is None or sys.version_info[:2] == (int(named[1]), int(named[2])):
        return sys.executable
    version = f"{named[1]}.{named[2]}"
    python = shutil.which(f"python{version}")
    works = python and subprocess.run([python, "-c", "import venv, ensurepip"], check=False, capture_output=True)
    if python and works and works.returncode == 0:
        return python
    raise SystemExit(
        f"error: {key}'s environment needs Python {version}, for which its packages have wheels, and there is none on "
        f"the PATH: install it (Debian 12: apt-get install python{version}-venv), or run this command with it"
    )


def install_packages(key: str, pins: str, folder: Path) -> None:
    """Makes the environment and installs what is missing.

    Raises:
        subprocess.CalledProcessError: a command failed, and printed why.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([find_python(key, pins), "-m", "venv", str(folder)], check=True)
    for some in filter(None, split_pins(pins)):
        # nothing is resolved; what comes as source is built with the setuptools of the pins
        subprocess.run([str(python), *INSTALL, "--no-deps", *some], check=True)


def check(key: str, pins: str) -> str:
    """Builds a row of env=<key> and renders an image, or imports the module that the pins name; returns what it did.

    Raises:
        RlinfError: the task cannot be built.
        subprocess.CalledProcessError: the module cannot be imported.
    """
    if module := re.search(r"^#.*its check imports ([\w.]+\w)", pins, re.MULTILINE):
        python = folder_of(key) / "bin" / "python"
        subprocess.run([str(python), "-c", f"import {module[1]}"], check=True)
        return f"imported {module[1]}"
    section = replace(compose_evaluate([f"env={key}", "policy=random"]).env, num_envs=1, block_size=1)
    make_env: Any = load_target(section._target_)
    env = make_env(section, 1)
    seen = env.reset([0])
    env.close()
    assert all(shown.float().std() > 1 for shown in seen.images.values()), "its images are of one colour"
    return f"built and rendered {seen.instruction[0]!r}"


@dataclass(kw_only=True)
class Options:
    """The keys."""

    env: str = ""  # agents, aloha, lerobot, libero, metaworld, pusht, so101, vla_eval or vllm


def set_up(own: Options) -> int:
    """Installs and checks; returns the exit code."""
    key, pins, folder = own.env, pins_of(own.env), folder_of(own.env)
    print(f"set-up of {folder}: up to 2 GB on disk (vllm: 3, lerobot: 6 GB) if nothing is there yet", flush=True)
    try:
        install_packages(key, pins, folder)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd[:6]))
        print(f"error: {command} ... failed: see above; the same command resumes", file=sys.stderr)
        return 1
    manual = install_renderer() if "mujoco==" in pins else ""
    try:
        print(f"{key}: {check(key, pins)}")
    except (RlinfError, subprocess.CalledProcessError) as error:
        print(f"error: {key} is installed and does not work: {error}", file=sys.stderr)
        if manual:
            print(f"error: there is no off-screen renderer: {manual}", file=sys.stderr)
        return 1
    return 0


def split_pins(text: str) -> tuple[list[str], list[str]]:
    """Returns the pins that others are built with, and the others, in the order of the file."""
    pins = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    first = [pin for pin in pins if pin.split("==")[0] in ("setuptools", "wheel")]
    return first, [pin for pin in pins if pin not in first]


def install_renderer() -> str:
    """Installs EGL if MuJoCo has no off-screen renderer and it may; returns what is left to do, "" if nothing is."""
    system = read_system()
    if has_opengl() or (os.geteuid() == 0 and install(system, OPENGL)):
        return ""
    return f"{manual_instructions(system)}, or set MUJOCO_GL to a renderer that is installed"


if __name__ == "__main__":
    main(set_up, Options)
