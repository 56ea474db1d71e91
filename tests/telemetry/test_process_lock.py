"""A lock is had by one process at a time, and free once that is gone; who has it is named."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry import process_lock
from rlinf_embodied.telemetry.process_lock import ProcessLock
from rlinf_embodied.telemetry.run_folder import RunFolder

HOLD = (
    "import sys, time; from pathlib import Path; from rlinf_embodied.telemetry.process_lock import ProcessLock\n"
    "lock = ProcessLock(Path(sys.argv[1])); print(lock.take(), flush=True); time.sleep(600)"
)
ELSEWHERE = "process 17 on alpha since 2026-01-31 12:00:00"


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.wait()


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "a file system without locks"])
def test_a_living_process_keeps_it_and_a_dead_one_does_not(tmp_path, other, monkeypatch, locks) -> None:
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = ProcessLock(tmp_path / "lock")
    assert str(lock.take()).startswith(f"process {other.pid} on {socket.gethostname()} since 20")
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert lock.take() is None
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_what_was_given_back_is_free_on_every_machine(tmp_path) -> None:
    lock = ProcessLock(tmp_path / "lock")
    assert lock.take() is None
    assert ProcessLock(tmp_path / "lock").take() is not None
    lock.release()
    assert (tmp_path / "lock").read_text() == ""
    assert ProcessLock(tmp_path / "lock").take() is None


def test_a_lease_of_another_machine_is_respected_until_it_has_ended(tmp_path: Path) -> None:
    """As after a job was requeued under another host name: no person has to remove anything."""
    lock = tmp_path / ".lock"
    lock.write_text(ELSEWHERE)
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path, locked=True)
    parts = ["run.dir is", ELSEWHERE, "its lease ends in", "then give the command again", "use another run.dir"]
    assert [part for part in parts if part not in str(caught.value)] == []
    assert lock.read_text() == ELSEWHERE
    long_ago = time.time() - 2 * process_lock._LEASE_S
    os.utime(lock, (long_ago, long_ago))
    RunFolder(tmp_path, locked=True).unlock()


def test_a_holder_renews_its_lease(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process_lock, "_RENEW_S", 0.02)
    lock = ProcessLock(tmp_path / "lock")
    assert lock.take() is None
    os.utime(tmp_path / "lock", (1.0, 1.0))
    deadline = time.monotonic() + 10
    while (tmp_path / "lock").stat().st_mtime == 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()
