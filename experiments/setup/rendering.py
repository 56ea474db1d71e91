"""Makes sure that SAPIEN and MuJoCo can render: finds a Vulkan device and EGL, or installs Mesa's (llvmpipe).

`python -m experiments.setup.rendering` checks, installs Mesa if it may (root on Debian or Ubuntu) and checks again by
rendering an image.  Exit code 0: SAPIEN renders; 1: it does not, and the last lines name the command to run.  Without
EGL the command to run is only printed: MuJoCo's simulators are optional.

SAPIEN needs descriptor indexing, which Mesa's llvmpipe has from 23.1 on.  Debian 12 ships 22.3.6, so there the package
comes from bookworm-backports, taken from the same mirror as the machine's other packages and for this call of apt only.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VULKAN, OPENGL = ("mesa-vulkan-drivers", "libvulkan1"), ("libegl1",)  # Debian's packages
BACKPORTS = "bookworm-backports"
APT_ROOT = Path("/etc/apt")
OLDEST_STOCK = {"debian": 13, "ubuntu": 22}  # releases whose own Mesa is new enough
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
APT_OPTIONS = ("-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")

# In a separate process, since a broken driver may end the process.  The first image costs llvmpipe six seconds.
PROBE = """
import sys, sapien
try:
    render = sapien.render.RenderSystem()
except RuntimeError:
    render = sapien.render.RenderSystem(sapien.Device("cpu"))
scene = sapien.Scene([sapien.physx.PhysxCpuSystem(), render])
camera = scene.add_camera("probe", 16, 16, 1.0, 0.1, 10.0)
if "--picture" in sys.argv:
    scene.update_render()
    camera.take_picture()
    assert camera.get_picture("Color").shape == (16, 16, 4)
lines = sapien.render.get_device_summary().splitlines()
print(", ".join(line.removeprefix("GPU:").strip() for line in lines if line.startswith("GPU:")))
"""


@dataclass(frozen=True)
class System:
    """The parts of /etc/os-release that decide, for example System("debian", 12)."""

    name: str
    version: int


def ask(code: str, *arguments: str, timeout_s: float = 180.0) -> tuple[str, str]:
    """Returns what a piece of Python prints last, and what went wrong (an empty text if nothing did)."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:.0f} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return "", said[-1] if said else f"the process ended with code {done.returncode}"
    return (done.stdout.strip().splitlines() or [""])[-1], ""


def probe_rendering(picture: bool = False) -> tuple[str, str]:
    """Returns the Vulkan devices (several: comma-separated) that SAPIEN finds, and why it cannot render, "" if it can.

    With `picture` it must also render one.
    """
    return ask(PROBE, *(["--picture"] if picture else []))


def has_opengl() -> bool:
    """Returns whether MuJoCo has an off-screen renderer: EGL or OSMesa is installed, or MUJOCO_GL names another."""
    return bool(os.environ.get("MUJOCO_GL")) or any(map(ctypes.util.find_library, ("EGL", "OSMesa")))


def read_system(path: Path = Path("/etc/os-release")) -> System:
    """Returns the Linux distribution; System("unknown", 0) where there is no such file."""
    if not path.exists():
        return System("unknown", 0)
    pairs = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    version = pairs.get("VERSION_ID", "0").strip('"').split(".")[0]
    return System(pairs.get("ID", "unknown").strip('"'), int(version) if version.isdigit() else 0)


def find_mirror(apt_root: Path = APT_ROOT) -> str | None:
    """Returns the address that this machine's apt takes Debian 12 from, None if there is no such source."""
    for path in [apt_root / "sources.list", *sorted((apt_root / "sources.list.d").glob("*"))]:
        if path.suffix == ".sources":
            for stanza in path.read_text().split("\n\n"):
                keys = dict(re.findall(r"^([A-Za-z-]+):\s*(.+)$", stanza, re.MULTILINE))
                if "bookworm" in keys.get("Suites", "").split():
                    return keys["URIs"].split()[0]
        elif path.suffix == ".list" and path.is_file():
            found = re.search(r"^deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+bookworm\s", path.read_text(), re.MULTILINE)
            if found:
                return found[1]
    return None


def install_commands(
    system: System, packages: Sequence[str], sources: Path, apt_root: Path = APT_ROOT
) -> list[list[str]] | None:
    """Returns the commands that install packages on this distribution, None for an unknown one.

    Args:
        system: the distribution.
        packages: some of VULKAN and OPENGL.
        sources: an empty folder, for the apt sources of these commands; filled for Debian 12, otherwise left alone.
        apt_root: where apt's own settings lie.
    """
    options, release = list(APT_OPTIONS), []
    if (system.name, system.version) == ("debian", 12):
        mirror = find_mirror(apt_root)
        if mirror is None:
            return None
        for path in (apt_root / "sources.list.d").glob("debian*"):
            shutil.copy(path, sources)
        (sources / "backports.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {BACKPORTS} main\n")
        options += ["-o", f"Dir::Etc::sourceparts={sources}"]
        release = ["-t", BACKPORTS]
    elif system.version < OLDEST_STOCK.get(system.name, 1 << 30):
        return None
    install = ["apt-get", *options, "install", "-y", "-q", "--no-install-recommends", *release, *packages]
    return [["apt-get", *options, "update", "-q"], install]


def manual_instructions(system: System) -> str:
    """Returns what a person without root, or on another system, has to run."""
    script = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).resolve()))}"
    if system.name in ("debian", "ubuntu"):
        return f"run as root:\n  sudo {script}"
    known = {"fedora": "dnf install", "rhel": "dnf install", "arch": "pacman -S", "opensuse": "zypper install"}
    arch = system.name == "arch"
    names = "vulkan-swrast vulkan-icd-loader libglvnd" if arch else "mesa-vulkan-drivers vulkan-loader libglvnd-egl"
    command = f"sudo {known.get(system.name, '<your package manager> install')} {names}"
    return f"install Mesa's Vulkan drivers (23.1 or newer) and EGL, and check again:\n  {command} && {script}"


def nvidia_hint() -> str:
    """Returns what keeps an NVIDIA GPU from rendering, an empty text where there is no such GPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    return (
        "An NVIDIA GPU is here, but its Vulkan driver is not. On a host install the libnvidia-gl package of the "
        "driver's version; for a container set NVIDIA_DRIVER_CAPABILITIES=all. Until then a CPU renders."
    )


def install(system: System, packages: Sequence[str]) -> bool:
    """Runs the commands for this distribution and packages; returns whether there were any and they ended well."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        sources.chmod(0o755)  # apt drops its privileges while it reads and loads
        commands = install_commands(system, packages, sources)
        for command in commands or []:
            print("+ " + shlex.join(command), flush=True)
            done = subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=False)
            # an unrelated source that does not answer fails the update, yet the install may well succeed
            if done.returncode != 0 and "install" in command:
                return False
        return commands is not None


@dataclass
class Options:
    """There are no keys."""


def make_render(own: Options) -> int:
    (device, why), opengl = probe_rendering(), has_opengl()
    print(f"Vulkan: {f'no usable device ({why})' if why else device}")
    if not opengl:
        print("OpenGL: neither EGL nor OSMesa is installed, with which MuJoCo's simulators render")
    if not why and opengl:
        return 0
    if why and (hint := nvidia_hint()):
        print(hint)
    wanted = [*(VULKAN if why else ()), *(() if opengl else OPENGL)]
    system, is_root = read_system(), os.geteuid() == 0
    if not (is_root and install(system, wanted)):
        problem = "could not be installed" if is_root else "needs root to be installed"
        print(f"error: {' '.join(wanted)} {problem}: {manual_instructions(system)}", file=sys.stderr)
        return int(bool(why))
    device, why = probe_rendering(picture=True)
    if why:
        print(f"error: SAPIEN still cannot render ({why}): {manual_instructions(system)}", file=sys.stderr)
        return 1
    print(f"Vulkan: {device} ({' '.join(wanted)} installed; a picture was rendered)")
    return 0


if __name__ == "__main__":
    from rlinf_embodied.command_line import main  # the doctor imports this module where libraries may be missing

    main(make_render, Options)
