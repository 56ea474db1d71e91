"""A lock is had by one process at a time, and free once that is gone; who has it is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.process_lock import ProcessLock
from rlinf_embodied.telemetry.run_folder import RunFolder

HOLD = (
    "import sys, time; from pathlib import Path; from rlinf_embodied.telemetry.process_lock import ProcessLock\n"
    "lock = ProcessLock(Path(sys.argv[1])); print(lock.take(), flush=True); time.sleep(600)"
)


def test_a_living_process_keeps_it_and_a_dead_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "None\n"
        lock = ProcessLock(path)
        holder = f"process {other.pid} on {socket.gethostname()} since 20"
        assert str(lock.take()).startswith(holder)
        with pytest.raises(ConfigError, match=rf"run\.dir is .*another run writes it \({holder}.*use another run\.dir"):
            RunFolder(tmp_path, locked=True)
        other.send_signal(signal.SIGKILL)
    assert lock.take() is None
    assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_what_was_given_back_is_free(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "lock")
    assert lock.take() is None
    assert ProcessLock(tmp_path / "lock").take() is not None
    lock.release()
    assert (tmp_path / "lock").read_text() == ""
    assert ProcessLock(tmp_path / "lock").take() is None
