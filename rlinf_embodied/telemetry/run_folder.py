"""The run folder and its files, a contract for users and scripts.

config.yaml  manifest.json  profile.json  plan.json  metrics.jsonl  episodes.csv  summary.json
trace.json  videos/  checkpoints/  .lock
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import ConfigError, write_whole, writing

_PACKAGES = ("torch", "ray", "mani_skill", "sapien", "gymnasium", "timm", "transformers", "numpy", "omegaconf")


def library_versions() -> dict[str, str]:
    """Returns the installed versions of the libraries that results depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision() -> str | None:
    """Returns the revision of this checkout, with "+" if it has uncommitted changes; None outside of one."""
    root = Path(__file__).parent
    try:
        ask = lambda *words: subprocess.run(  # noqa: E731
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return ask("rev-parse", "HEAD") + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: Path, locked: bool = False) -> None:
        """Creates the folder; `locked`: locks it against other processes until `unlock` or the end of this process.

        Raises:
            ConfigError: it cannot be written, or another process has locked it.
        """
        self.path, self.checkpoints, self.videos = path, path / "checkpoints", path / "videos"
        self.best = path / "best"  # the checkpoint of the best check
        self._lock: TextIO | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            if locked:
                self._lock = (path / ".lock").open("a+", encoding="utf-8")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when the process ends
        except BlockingIOError as error:
            raise ConfigError(
                f"run.dir is {str(path)!r}, but another run writes it: wait for its end, or use another run.dir"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"run.dir is {str(path)!r}, but it cannot be written ({error.strerror}): use another run.dir"
            ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def write_text(self, name: str, text: str) -> Path:
        """Writes a small file atomically: readers see the old content or the new one.

        Raises:
            RunFileError: it cannot be written.
        """
        write_whole(self.path / name, text)
        return self.path / name

    def write_json(self, name: str, content: object) -> Path:
        return self.write_text(name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def append_json(self, name: str, content: object) -> None:
        with writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def write_manifest(self, seed: int, cluster: Cluster) -> None:
        """Writes manifest.json: versions, seed, git revision, hardware, command and pinned settings."""
        hardware = {
            "cluster": cluster.name,
            "devices": cluster.num_devices,
            "kind": cluster.kind,
            "description": cluster.description,
            "cores": cluster.num_cores,
            "memory_bytes": cluster.memory_bytes,
            "machine": platform.machine(),
            "system": platform.platform(),
        }
        facts = {"versions": library_versions(), "seed": seed, "git_revision": git_revision(), "hardware": hardware}
        self.write_json("manifest.json", facts | {"command": sys.argv, "pinned": portable.describe()})
