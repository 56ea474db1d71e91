"""Installs the versions of constraints.txt, and the project, into the environment of the Python that runs it.

`python -m experiments.setup.environment` installs what a run needs, `--dev` also what tests and checks need.  What is
there already is left alone.  Nothing but the standard library is imported, since nothing else is there yet.

constraints.txt names every package with its version, so nothing has to be resolved, and four lanes work side by side
(one pip waits for the network while another one writes its files):

    torch    pip: torch, triton and NVIDIA's libraries              ---+
    one      pip: every second one of the others                    ---+-> check: pip check; everything is imported,
    two      pip: setuptools; then the project and the other half   ---+   which leaves byte code of what runs use
    vulkan   Mesa's software renderer, where no driver is at all    ---+

A lane that fails ends the others, and its last words are printed; <environment>/setup_<lane>.log has all of them.  An
interrupted set-up is gone on with by the same command.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOG_EVERY_S = 10.0  # between two lines where nobody watches a terminal
POLL_S = 0.5
STOP_S = 10.0  # pip removes its temporary files meanwhile

# All pins are given, so pip need not look for dependencies.  Byte code of all 20,600 files costs a core 50 s, and
# a run imports a quarter of them.  Packages that come as source are built with the setuptools of the lane's first step.
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
INSTALL = (*PIP, "install", "--no-deps", "--no-compile", "--no-build-isolation", "--progress-bar", "off")

# What runs import, in two processes: the second one comes to torch when the first one has compiled most of it.
IMPORTS = (
    "import torch, torchvision, timm, transformers, safetensors.torch, torch.distributed.fsdp",
    "import omegaconf, rich.live, ray, sapien, av, matplotlib.pyplot, gymnasium, tensorboard, mani_skill.envs",
)


@dataclass
class Lane:
    """Commands that run one after the other while other lanes run theirs."""

    name: str
    commands: list[list[str]]
    packages: int = 0
    must_succeed: bool = True
    log: Path = field(default_factory=Path)
    process: subprocess.Popen[bytes] | None = None

    def advance(self) -> bool:
        """Starts the next command where none runs; returns whether the lane goes on."""
        code = self.process.poll() if self.process is not None else 0
        if code is None:
            return True
        if (code != 0 and self.must_succeed) or not self.commands:
            return False
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.commands.pop(0), cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        return True

    def failed(self) -> bool:
        """Returns whether a command of the lane ended badly and the set-up cannot go on without it."""
        return self.must_succeed and self.process is not None and self.process.poll() not in (None, 0)


@dataclass(frozen=True)
class Fetched:
    """How far a pip has come before it writes files: packages it has, and the one that it is loading."""

    count: int
    current: str


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


def split_pins(pins: list[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Returns the pins of setuptools, of torch and what it brings for GPUs, and two halves of the others."""
    first = [pin for pin in pins if pin.startswith("setuptools==")]
    # 20 wheels, but more than half of all bytes
    torch = [pin for pin in pins if re.match(r"(torch|triton|nvidia-.*|cuda-.*)==", pin)]
    others = [pin for pin in pins if pin not in first and pin not in torch]
    return first, torch, others[0::2], others[1::2]


def pin_of(info: Path) -> str:
    """Returns the canonical `name==version` of a folder such as torch-2.14.1.dist-info."""
    name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
    return f"{canonical(name)}=={version}"


@functools.cache
def recorded_bytes(record: Path, changed_ns: int) -> int | None:
    """Returns the bytes of a package by its RECORD, None if pip is not done (its last act is to enter INSTALLER)."""
    lines = record.read_text(errors="replace").splitlines()
    if not any(line.startswith(f"{record.parent.name}/INSTALLER,") for line in lines):
        return None
    return sum(int(size) for line in lines if (size := line.rpartition(",")[2]).isdigit())


def finished_packages(site: Path) -> dict[str, int]:
    """Returns the bytes of every package that is wholly installed, by its canonical `name==version`."""
    found = {}
    for record in site.glob("*.dist-info/RECORD"):
        try:
            size = recorded_bytes(record, record.stat().st_mtime_ns)
        except FileNotFoundError:  # pip is just replacing it
            continue
        if size is not None:
            found[pin_of(record.parent)] = size
    return found


def remove_unfinished(site: Path, pins: list[str]) -> list[str]:
    """Removes the metadata of packages that an interrupted pip left half written, and would take for installed."""
    finished = finished_packages(site)
    unfinished = [info for info in site.glob("*.dist-info") if pin_of(info) not in finished and pin_of(info) in pins]
    for info in unfinished:
        shutil.rmtree(info)
    return [info.name for info in unfinished]


def read_fetched(output: str, packages: int) -> Fetched:
    """Returns how far pip has come, from what it printed; `packages` is how many it was told to install."""
    names = re.findall(r"^Collecting (\S+)", output, re.MULTILINE)
    if "Installing collected packages" in output.rpartition("Collecting")[2]:
        return Fetched(packages, "")
    if not names:
        return Fetched(0, "")
    size = re.search(r"Downloading .*?\(([\d.]+ [kMG]B)\)", output.rpartition("Collecting")[2])
    return Fetched(len(names) - 1, names[-1].replace("==", " ") + (f" ({size[1]})" if size else ""))


def progress_line(seconds: float, total: int, fetched: list[Fetched], installed: int, size_bytes: int) -> str:
    """Returns for example "set-up 34 s: of 147 packages 96 are here, 41 installed (2.1 GB); loading ray 2.60.0"."""
    here = max(installed, sum(lane.count for lane in fetched))
    done = f"{installed} installed ({size_bytes / 1e9:.1f} GB)"
    line = f"set-up {seconds:.0f} s: of {total} packages {here} are here, {done}"
    current = [lane.current for lane in fetched if lane.current]
    return f"{line}; loading {', '.join(current)}" if current else line


class Progress:
    """One line that is rewritten in a terminal; elsewhere a new line every ten seconds."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.start = time.monotonic()
        self.said_s = 0.0

    def seconds(self) -> float:
        """Returns the seconds since the set-up began."""
        return time.monotonic() - self.start

    def show(self, line: str) -> None:
        """Prints the line where it is time to."""
        if self.terminal:
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif self.seconds() - self.said_s >= LOG_EVERY_S:
            self.said_s = self.seconds()
            print(line, flush=True)

    def clear(self) -> None:
        """Leaves an empty line for what comes next."""
        if self.terminal:
            print("\r\x1b[K", end="", flush=True)


def last_words(log: Path) -> str:
    """Returns what says why a command failed: the lines that pip marks as errors, else the last lines."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("ERROR", "error"))]
    return "\n".join(f"  {line}" for line in (marked or lines)[-8:])


def stop(lanes: list[Lane]) -> None:
    """Ends what still runs, gently at first; waits for the system's package manager, which must not be cut off."""
    running = [(lane, lane.process) for lane in lanes if lane.process is not None and lane.process.poll() is None]
    for lane, process in running:
        if lane.must_succeed:
            process.send_signal(signal.SIGINT)
    for lane, process in running:
        try:
            process.wait(STOP_S if lane.must_succeed else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(lanes: list[Lane], progress: Progress, line: Callable[[], str]) -> Lane | None:
    """Runs the lanes side by side; returns the one that failed, after which the others were ended."""
    for lane in lanes:
        lane.log = Path(sys.prefix) / f"setup_{lane.name}.log"
        lane.log.write_bytes(b"")
    try:
        while True:
            going = [lane.advance() for lane in lanes]
            if failed := next((lane for lane in lanes if lane.failed()), None):
                return failed
            if not any(going):
                return None
            progress.show(line())
            time.sleep(POLL_S)
    finally:
        stop(lanes)
        progress.clear()


def install_lanes(wanted: list[str]) -> list[Lane]:
    """Returns the lanes that install these pins and the project; lanes without a package are left out."""
    python = sys.executable
    first, torch, one, two = split_pins(wanted)
    build = [[python, *INSTALL, *first]] if first else []
    lanes = [
        Lane("torch", [[python, *INSTALL, *torch]], len(torch)),
        Lane("one", [[python, *INSTALL, *one]], len(one)),
        Lane("two", [*build, [python, *INSTALL, "--editable", str(REPOSITORY), *two]], len(two) + len(first)),
    ]
    vulkan = [python, "-m", "experiments.setup.vulkan", "--early"]
    return [lane for lane in lanes if lane.packages or lane.name == "two"] + [Lane("vulkan", [vulkan], 0, False)]


def check_lanes() -> list[Lane]:
    """Returns the lanes that look at what was installed."""
    imports = [Lane(f"import_{i}", [[sys.executable, "-c", code]]) for i, code in enumerate(IMPORTS)]
    return [Lane("check", [[sys.executable, *PIP, "check"]]), *imports]


def set_up(dev: bool, progress: Progress) -> tuple[int, Lane | None]:
    """Installs and looks at the result; returns how many packages were missing, and the lane that failed if any."""
    site = Path(sysconfig.get_path("purelib"))
    pins = read_pins((REPOSITORY / "constraints.txt").read_text(), {"run", "dev"} if dev else {"run"})
    remove_unfinished(site, pins)
    before = finished_packages(site)
    wanted = [pin for pin in pins if pin not in before]
    lanes = install_lanes(wanted)

    def line() -> str:
        new = {pin: size for pin, size in finished_packages(site).items() if pin in wanted}
        fetched = [read_fetched(lane.log.read_text(errors="replace"), lane.packages) for lane in lanes if lane.packages]
        return progress_line(progress.seconds(), len(wanted), fetched, len(new), sum(new.values()))

    def checking() -> str:
        return f"set-up {progress.seconds():.0f} s: checking what was installed"

    failed = run(lanes, progress, line) or run(check_lanes(), progress, checking)
    if failed is not None and failed.name == "check":
        # pyproject.toml asks for what constraints.txt does not name: pip has to resolve after all
        print(f"pip check:\n{last_words(failed.log)}\ninstalling what is missing", flush=True)
        target = f"{REPOSITORY}[dev]" if dev else str(REPOSITORY)
        options = ["--constraint", str(REPOSITORY / "constraints.txt"), "--no-build-isolation", "--editable", target]
        resolve = Lane("resolve", [[sys.executable, *PIP, "install", "--progress-bar", "off", *options]])
        failed = run([resolve], progress, checking) or run(check_lanes(), progress, checking)
    return len(wanted), failed


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    dev = parser.parse_args().dev
    if sys.prefix == sys.base_prefix:
        print("error: this is no virtual environment: use make setup, or <environment>/bin/python", file=sys.stderr)
        return 1
    progress = Progress()
    print(f"set-up of {sys.prefix}: 7 GB on disk where nothing is there yet; one to five minutes", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        count, failed = set_up(dev, progress)
    except KeyboardInterrupt:
        print("set-up was interrupted; the same command goes on with it", file=sys.stderr)
        return 130
    if failed is not None:
        words = last_words(failed.log)
        print(f"error: set-up failed in {failed.name} (all of it: {failed.log}):\n{words}", file=sys.stderr)
        return 1
    print(f"set-up took {progress.seconds():.0f} s; {count} packages were installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
