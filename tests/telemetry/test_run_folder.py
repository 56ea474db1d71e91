"""One run at a time writes a folder, and what a killed one left keeps nobody out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.run_folder import RunFolder

HOLD = """
import sys
from pathlib import Path
from rlinf_embodied.telemetry.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), locked=True)
print("locked", flush=True)
sys.stdin.read()
"""


def test_another_run_is_refused_while_one_writes_the_folder_and_not_after_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=r"another run writes it: wait for its end, or use another run\.dir"):
            RunFolder(tmp_path, locked=True)
        process.kill()
    RunFolder(tmp_path, locked=True).unlock()


def test_a_note_of_another_host_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"host": "a pod that is gone", "pid": 1}')
    RunFolder(tmp_path, locked=True).unlock()
