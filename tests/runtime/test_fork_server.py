"""Workers are forked from a process that has made their imports, or start as Ray starts them where that cannot be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.runtime import fork_server
from rlinf_embodied.runtime.diagnosis import History
from rlinf_embodied.runtime.health import START, Health

WORKERS = """
import json, os, signal, sys, time
from pathlib import Path
from rlinf_embodied.runtime.host import WorkerSpec
from rlinf_embodied.runtime.ray_cluster import start_ray
from rlinf_embodied.runtime.ray_session import RaySession

start_ray(128 << 20, ["no_such_module"])
children = Path("/proc/self/task").glob("*/children")
pids = [pid for of in children for pid in of.read_text().split()]
server = next(int(pid) for pid in pids if b"no_such_module" in Path(f"/proc/{pid}/cmdline").read_bytes())
if "kill" in sys.argv:
    os.kill(server, signal.SIGKILL)
session = RaySession()
session.start([WorkerSpec(0, "cpu"), WorkerSpec(1, "cpu"), WorkerSpec(2, "cpu", threads=2)])
parents = {}
for worker, pid in session.processes().items():
    parents[worker] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert os.getpgid(pid) == pid  # Ray ends the group of a lost worker
session.close()
print(json.dumps([server, [worker for worker, parent in parents.items() if parent == server]]))
time.sleep(1)  # until Ray has reported lost workers
"""


def ends(pid: int) -> bool:
    """Returns whether a process is gone, at the latest in a while."""
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.ray
@pytest.mark.parametrize(("words", "forked"), [([], [0, 1]), (["kill"], [])])
def test_workers_with_the_variables_of_the_server_are_forked_while_it_lives(words, forked) -> None:
    said = subprocess.run([sys.executable, "-c", WORKERS, *words], capture_output=True, text=True, check=True)
    server, found = json.loads(
        next(line for line in said.stdout.splitlines() if line.startswith("["))
    )  # beside what Ray says
    assert found == forked
    assert "(raylet)" not in said.stdout + said.stderr
    assert ends(server)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can be somebody else")
def test_another_user_can_have_nothing_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RLINF_FORK_SERVER", "")  # put back afterwards
    fork_server.start([], {})
    script = tmp_path / "worker.py"
    script.write_text("import sys, torch; open(sys.argv[1], 'w').close()")
    for user, made in [(65534, False), (0, True)]:
        trace = tmp_path / str(user)
        os.seteuid(user)
        try:
            assert fork_server._has_forked([str(script), str(trace)]) is made
        finally:
            os.seteuid(0)
        while made and not trace.exists():
            time.sleep(0.05)
        assert trace.exists() is made


def test_a_process_that_cannot_import_ray_ends_the_wait_for_workers(tmp_path: Path, monkeypatch) -> None:
    """Ray starts another one every minute, and has the traceback in one of its logs only."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("\nimport no_such_library\n")
    monkeypatch.setenv("RLINF_FORK_SERVER", "")  # put back afterwards
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    health = Health({}, "here", History())
    for worker in (1, 0):
        health.note(object(), worker, START)
    monkeypatch.setattr(fork_server, "_BASE", ())  # torch takes seconds
    fork_server.start([], {})
    health._require_starts()  # nothing has failed yet
    assert fork_server._has_forked([str(tmp_path / "worker.py")])

    def wait() -> None:
        for _ in range(600):
            health._require_starts()
            time.sleep(0.1)

    place = re.escape(f"({tmp_path}/ray/__init__.py, line 2)")
    reason = rf"pid \d+, cannot import ray: ModuleNotFoundError: No module named 'no_such_library' {place}"
    with pytest.raises(WorkerError, match=rf"^workers 0, 1 cannot start \({reason}\): correct that module") as caught:
        wait()
    assert caught.value.workers == (0, 1)
    assert fork_server.failure() == ""
