"""Examines this machine for runs: one line per part, and for each problem its fix.

Parts that may crash (drivers) or take long (Ray) are tried in separate processes.  Imports nothing that has to be
installed: a missing library is a finding.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

GIB = 2**30
LEAST_MEMORY_BYTES = 3 * GIB  # two workers with a simulator, and the driver
LEAST_DISK_BYTES = 2 * GIB  # checkpoints and videos of a few runs
LEAST_SHARED_BYTES = GIB // 2  # Ray's object store; below it, Ray falls back to files and says so in every run
LIBRARIES = ("ray", "mani_skill", "sapien", "torch", "torchvision", "timm", "transformers", "omegaconf", "numpy")

TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability(),
    "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus],
}))
"""
RAY_PROBE = """
import json, logging, time, ray
start = time.perf_counter()
ray.init(
    address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
)
assert ray.get(ray.remote(lambda: 42).remote(), timeout=60) == 42
print(json.dumps({"version": ray.__version__, "seconds": time.perf_counter() - start}))
ray.shutdown()
"""
MANISKILL_PROBE = """
import json, mani_skill.envs
from mani_skill.utils.registration import REGISTERED_ENVS
print(json.dumps({"tasks": len(REGISTERED_ENVS)}))
"""


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


def ask(code: str, timeout_s: float = 180.0) -> tuple[dict, str]:
    """Returns the JSON that a piece of Python prints last, and what went wrong (an empty text if nothing did)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {timeout_s:.0f} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return {}, said[-1] if said else f"the process ended with code {done.returncode}"
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def check_python() -> Finding:
    """Returns the interpreter and whether it is one that the project supports."""
    found = f"{platform.python_version()} at {sys.executable}"
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    return Finding("Python", State.ok if fits else State.broken, found, "" if fits else "install 3.11, then make setup")


def check_libraries() -> Finding:
    """Returns the versions of the libraries that decide, and those that differ from constraints.txt."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return Finding(
                "Libraries", State.broken, f"{name} is not installed", "make setup, then use .venv/bin/python"
            )
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    other = [f"{name} {version}" for name, version in versions.items() if pinned.get(name, version) != version]
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if other:
        return Finding("Libraries", State.slow, found, f"not as in constraints.txt: {', '.join(other)}; make setup")
    return Finding("Libraries", State.ok, found)


def check_torch() -> list[Finding]:
    """Returns how torch computes: threads and instruction set, and the GPUs that it sees."""
    seen, error = ask(TORCH_PROBE)
    if error:
        return [Finding("torch", State.broken, error, "make clean setup")]
    compute = Finding("torch", State.ok, f"{seen['version']}, {seen['threads']} thread(s), {seen['cpu']}")
    gpus = ", ".join(f"{name} ({size / GIB:.0f} GiB)" for name, size in seen["gpus"])
    if not gpus and any(Path("/dev").glob("nvidia[0-9]*")):
        fix = "an NVIDIA GPU is here, but torch does not see it: update the driver, look at CUDA_VISIBLE_DEVICES"
        return [compute, Finding("GPUs", State.slow, "none that torch can use", fix)]
    return [compute, Finding("GPUs", State.ok, gpus or "none; runs use the CPU cores")]


def check_maniskill() -> Finding:
    """Returns whether ManiSkill can be imported and how many tasks it knows."""
    seen, error = ask(MANISKILL_PROBE)
    if error:
        return Finding("ManiSkill", State.broken, error, "make clean setup")
    version, sapien = importlib.metadata.version("mani_skill"), importlib.metadata.version("sapien")
    return Finding("ManiSkill", State.ok, f"{version} on SAPIEN {sapien}, {seen['tasks']} tasks")


def check_ray() -> Finding:
    """Returns whether a Ray cluster starts here and answers a call."""
    seen, error = ask(RAY_PROBE)
    if error:
        return Finding("Ray", State.broken, error, "free some memory and /dev/shm, or run with cluster=serial")
    return Finding("Ray", State.ok, f"{seen['version']}, a cluster answered after {seen['seconds']:.0f} s")


def check_threads() -> Finding:
    """Returns the cores of this process, and the settings that keep several workers from using all of them at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    names = ("OMP_NUM_THREADS", "LP_NUM_THREADS")
    found = f"{cores} core(s); " + ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in names)
    many = [name for name in names if os.environ.get(name, "1") != "1"]
    if many:
        fix = f"{' and '.join(many)} above 1 makes workers fight for cores: unset (workers use one thread each)"
        return Finding("Threads", State.slow, found, fix)
    return Finding("Threads", State.ok, found)


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
    found = f"{free / GIB:.0f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("Disk", State.broken, f"{folder} cannot be written", "set run.dir to a folder of yours")
    if free < LEAST_DISK_BYTES:
        return Finding("Disk", State.broken, found, f"free {LEAST_DISK_BYTES / GIB:.0f} GiB, or set run.dir elsewhere")
    return Finding("Disk", State.ok, found)


def examine(check_vulkan: Callable[[], Finding]) -> list[Finding]:
    """Returns all findings, in the order in which a problem would stop a run.

    Args:
        check_vulkan: says whether SAPIEN can render; what makes it so is the set-up's, which runs before all else.
    """
    findings = [check_python(), check_libraries(), check_threads(), check_memory(), check_disk()]
    if any(finding.part == "Libraries" and finding.state is State.broken for finding in findings):
        return findings
    return [*findings, *check_torch(), check_vulkan(), check_maniskill(), check_ray()]


def show(findings: list[Finding]) -> None:
    """Prints a line for each finding, and below it what to do."""
    part = max(len(finding.part) for finding in findings)
    for finding in findings:
        head = f"{finding.part:<{part}}  {finding.state:<7}  "
        print(f"{head}{finding.found}")
        if finding.fix:
            print(f"{'->':>{len(head) - 2}}  {finding.fix}")


def verdict(findings: list[Finding]) -> int:
    """Prints findings and what they come to; returns the exit code, 1 where a run would fail."""
    show(findings)
    broken = [finding.part for finding in findings if finding.state is State.broken]
    print(f"problems: {', '.join(broken)}" if broken else "a run can start on this machine")
    return 1 if broken else 0
