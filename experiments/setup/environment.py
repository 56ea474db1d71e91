"""Installs the versions of constraints.txt, and the project, into the environment of the Python that runs it.

`python -m experiments.setup.environment` installs what a run needs, `dev=true` also what tests and checks need.
Packages that are installed already stay.  Only the standard library is imported, since nothing else is installed yet.

constraints.txt names every package with its version, so pip resolves nothing.  pip compiles no byte code either: for
all 20,600 files that takes a core 50 s, and a run imports a quarter of them.  Importing these leaves theirs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
INSTALL = (*PIP, "install", "--no-compile", "--no-build-isolation", "--progress-bar", "off")

# What runs import, in two processes: the second one reaches torch when the first one has compiled most of it.
IMPORTS = (
    "import torch, torchvision, timm, transformers, safetensors.torch, torch.distributed.fsdp",
    "import omegaconf, ray, sapien, av, matplotlib.pyplot, gymnasium, tensorboard, mani_skill.envs",
)


def canonical(name: str) -> str:
    """Returns a package's name as indexes spell it: "ruamel.Yaml_x" is "ruamel-yaml-x"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str, sections: set[str]) -> list[str]:
    """Returns the canonical `name==version` of the lines below the headings `# [section] ...` of these sections."""
    pins, section = [], ""
    for line in text.splitlines():
        if heading := re.match(r"# \[(\w+)\]", line):
            section = heading[1]
        elif "==" in line and section in sections:
            name, version = line.strip().split("==")
            pins.append(f"{canonical(name)}=={version}")
    return pins


def pin_of(info: Path) -> str:
    """Returns the canonical `name==version` of a folder such as torch-2.14.1.dist-info."""
    name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
    return f"{canonical(name)}=={version}"


def is_complete(info: Path) -> bool:
    """Returns whether pip has finished a package: entering INSTALLER into its RECORD is the last thing that it does."""
    record = info / "RECORD"
    return record.exists() and f"{info.name}/INSTALLER," in record.read_text(errors="replace")


def missing_pins(site: Path, pins: Sequence[str]) -> list[str]:
    """Returns the pins that are not installed; removes metadata that an interrupted pip left, and would trust."""
    installed = set()
    for info in site.glob("*.dist-info"):
        if is_complete(info):
            installed.add(pin_of(info))
        elif pin_of(info) in pins:
            shutil.rmtree(info)
    return [pin for pin in pins if pin not in installed]


def run(command: Sequence[str]) -> None:
    """Runs Python with these words; its output is shown.

    Raises:
        CalledProcessError: it failed.
    """
    subprocess.run([sys.executable, *command], cwd=REPOSITORY, check=True)


def install(pins: Sequence[str], extras: str) -> None:
    """Installs pins and the project, and compares the result with what pyproject.toml asks for.

    Raises:
        CalledProcessError: a pip failed; it has printed why.
    """
    if build := [pin for pin in pins if pin.startswith("setuptools==")]:  # builds what comes as source
        run([*INSTALL, "--no-deps", *build])
    run([*INSTALL, "--no-deps", "--editable", str(REPOSITORY), *(pin for pin in pins if pin not in build)])
    if subprocess.run([sys.executable, *PIP, "check"], cwd=REPOSITORY, check=False).returncode:
        print("constraints.txt does not name all that is needed: pip resolves the rest", flush=True)
        run([*INSTALL, "--constraint", "constraints.txt", "--editable", f"{REPOSITORY}{extras}"])


def import_all() -> bool:
    """Imports what runs import; returns whether that worked.

    Byte code is kept even if PYTHONDONTWRITEBYTECODE is set, as in many container images.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=env) for code in IMPORTS]
    codes = [process.wait() for process in processes]
    return not any(codes)


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, end="")
        return 0
    dev = sys.argv[1:] == ["dev=true"]
    if sys.argv[1:] and not dev:
        print(f"error: {sys.argv[1]} is unknown: use dev=true, or nothing", file=sys.stderr)
        return 2
    if sys.prefix == sys.base_prefix:
        print("error: not in a virtual environment: use make setup, or <environment>/bin/python", file=sys.stderr)
        return 1
    start = time.monotonic()
    print(f"set-up of {sys.prefix}: 7 GB on disk, one to five minutes; run it again if it is interrupted", flush=True)
    pins = read_pins((REPOSITORY / "constraints.txt").read_text(), {"run", "dev"} if dev else {"run"})
    missing = missing_pins(Path(sysconfig.get_path("purelib")), pins)
    try:
        install(missing, "[dev]" if dev else "")
    except subprocess.CalledProcessError:
        print("error: set-up failed: see pip's messages above", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up was interrupted; the same command resumes it", file=sys.stderr)
        return 130
    if not import_all():
        print("error: set-up failed: an installed package cannot be imported, see above", file=sys.stderr)
        return 1
    print(f"set-up took {time.monotonic() - start:.0f} s; {len(missing)} packages were installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
