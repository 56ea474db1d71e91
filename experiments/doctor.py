"""Examines this machine for runs: one line per part, and for each problem its fix.

`python experiments/doctor.py`; exit code 0: a run can start; 1: at least one part is `broken`.  A part
that is `slow` costs speed only.

Parts that may crash (drivers) or take long (Ray) are tried in separate processes.  Imports nothing that has to be
installed: a missing library is a finding.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from experiments.setup.rendering import ask, manual_instructions, nvidia_hint, probe_rendering, read_system

GIB = 2**30
LEAST_MEMORY_BYTES = 3 * GIB  # two workers with a simulator, and the driver
LEAST_DISK_BYTES = 2 * GIB  # checkpoints and videos of a few runs
LEAST_SHARED_BYTES = GIB // 2  # Ray's object store; below it, Ray falls back to files and says so in every run
LIBRARIES = ("ray", "mani_skill", "sapien", "torch", "torchvision", "timm", "transformers", "omegaconf", "numpy")

TORCH_PROBE = """
import torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
cpu = f"{torch.get_num_threads()} thread(s), {torch.backends.cpu.get_cpu_capability()}"
print(f"{cpu}; {names or 'no GPU, runs use the CPU cores'}")
"""
MANISKILL_PROBE = """
import mani_skill.envs
from mani_skill.utils.registration import REGISTERED_ENVS
print(f"{len(REGISTERED_ENVS)} tasks")
"""
RAY_PROBE = """
import logging, time, ray
start = time.perf_counter()
ray.init(
    address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
)
assert ray.get(ray.remote(lambda: 42).remote(), timeout=60) == 42
print(f"a cluster answered after {time.perf_counter() - start:.0f} s")
ray.shutdown()
"""
PROBES = {  # by part: code, and what to do where it fails
    "torch": (TORCH_PROBE, "make clean setup"),
    "ManiSkill": (MANISKILL_PROBE, "make clean setup"),
    "Ray": (RAY_PROBE, "free some memory and /dev/shm, or run with cluster=serial"),
}


class State(StrEnum):
    """How a finding bears on a run."""

    ok = "ok"
    slow = "slow"  # a run works, but slower than it could
    broken = "broken"  # a run fails


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    part: str
    state: State
    found: str
    fix: str = ""


def check_libraries() -> Finding:
    """Returns the versions of Python and the libraries that decide, and those that differ from constraints.txt."""
    versions, part = {"Python": platform.python_version()}, "Libraries"
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        found = f"Python {versions['Python']} at {sys.executable}"
        return Finding(part, State.broken, found, "install Python 3.11, then make setup")
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return Finding(part, State.broken, f"{name} is not installed", "make setup, then use .venv/bin/python")
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    other = [f"{name} {version}" for name, version in versions.items() if pinned.get(name, version) != version]
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    fix = f"not as in constraints.txt: {', '.join(other)}; make setup" if other else ""
    return Finding(part, State.slow if other else State.ok, found, fix)


def check_memory() -> Finding:
    """Returns the memory that is free, and the size of the shared memory that Ray keeps its objects in."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if Path("/proc/meminfo").exists():
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    found = f"{available / GIB:.1f} GiB free, /dev/shm {shared / GIB:.1f} GiB"
    if available < LEAST_MEMORY_BYTES:
        return Finding("Memory", State.broken, found, f"free memory until {LEAST_MEMORY_BYTES / GIB:.0f} GiB are left")
    if shared < LEAST_SHARED_BYTES:
        return Finding("Memory", State.slow, found, "enlarge /dev/shm (docker run --shm-size=2g)")
    return Finding("Memory", State.ok, found)


def check_disk() -> Finding:
    """Returns the room for runs, and whether their folder can be written."""
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("Disk", State.broken, f"{folder} cannot be written", "set run.dir to a folder of yours")
    found, short = f"{free / GIB:.0f} GiB free in {folder}", free < LEAST_DISK_BYTES
    fix = f"free {LEAST_DISK_BYTES / GIB:.0f} GiB, or set run.dir elsewhere" if short else ""
    return Finding("Disk", State.broken if short else State.ok, found, fix)


def probe(part: str) -> Finding:
    code, fix = PROBES[part]
    found, error = ask(code)
    if error:
        return Finding(part, State.broken, error, fix)
    if part == "torch" and "no GPU" in found and any(Path("/dev").glob("nvidia[0-9]*")):
        fix = "an NVIDIA GPU is here, but torch does not see it: update the driver, look at CUDA_VISIBLE_DEVICES"
        return Finding(part, State.slow, found, fix)
    return Finding(part, State.ok, found)


def check_vulkan() -> Finding:
    """Returns the Vulkan device that SAPIEN renders a picture with."""
    device, why = probe_rendering(picture=True)
    if why:
        fix = f"make setup, or {manual_instructions(read_system())}"
        return Finding("Vulkan", State.broken, why, f"{nvidia_hint()} {fix}".strip())
    if "llvmpipe" not in device:
        return Finding("Vulkan", State.ok, device)
    found = f"{device} (software: a CPU renders)"
    return Finding("Vulkan", State.slow if nvidia_hint() else State.ok, found, nvidia_hint())


def examine() -> list[Finding]:
    """Returns all findings, in the order in which a problem would stop a run."""
    findings = [check_libraries(), check_memory(), check_disk()]
    if findings[0].state is State.broken:
        return findings
    return [*findings, check_vulkan(), *map(probe, PROBES)]


def verdict(findings: list[Finding]) -> int:
    """Prints findings, below each what to do, and what they come to; returns 1 where a run would fail, 0 otherwise."""
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        print(f"{finding.part:<{width}}  {finding.state:<7}  {finding.found}")
        if finding.fix:
            print(f"{'':<{width}}       ->  {finding.fix}")
    broken = [finding.part for finding in findings if finding.state is State.broken]
    print(f"problems: {', '.join(broken)}" if broken else "a run can start on this machine")
    return 1 if broken else 0


if __name__ == "__main__":
    # without the other commands' main, which imports what may be missing
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, end="")
        sys.exit(0)
    if sys.argv[1:]:
        print(f"error: {sys.argv[1]} is unknown: this command has no keys", file=sys.stderr)
        sys.exit(2)
    sys.exit(verdict(examine()))
