"""What a killed process leaves in the temporary folder goes at the next start; what belongs to anyone else stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_embodied.runtime.own_folder import OwnFolder

HOLD = (
    "import sys, time; from rlinf_embodied.runtime.own_folder import OwnFolder\n"
    "folder = OwnFolder(); folder.owns_ray(sys.argv[1]); print(folder.path, flush=True); time.sleep(600)"
)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_folders_of_killed_processes_are_removed_with_their_sessions_of_ray(root) -> None:
    foreign = [root / "rlinf-theirs", root / "rlinf-begun", root / "session_other", root / "other"]
    for folder in foreign:
        folder.mkdir()
    (root / "rlinf-begun/owner").touch()
    ray = root / "session_1"
    (ray / "logs").mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(ray)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    killed = Path(process.stdout.readline().strip())
    mine = OwnFolder()
    assert (killed / "owner").read_text().startswith(f"process {process.pid} on ")
    assert ray.exists()  # its process lives
    process.kill()
    process.wait()
    other = OwnFolder()
    assert not killed.exists()
    assert not ray.exists()
    assert all(folder.exists() for folder in (*foreign, mine.path, other.path))
    mine.cleanup()
    other.cleanup()
    assert sorted(root.iterdir()) == sorted(foreign)
