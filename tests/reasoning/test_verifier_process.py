"""The process answers in order, costs what its limits say, and is replaced when it ends."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.reasoning import verifier
from rlinf_embodied.reasoning.verifier import MathVerifier

EASY = [("1/2", "0.5"), ("$\\frac{1}{3}$", "0.5"), ("$x=5$", "$5$"), ("$x+1$", "$1+x$"), ("2", "3")]
RIGHT = [True, False, True, True, False]
# each of these takes math-verify more than a second, most of them for ever
ENDLESS = ["9**9**9**9", "1 " * 300_000]


@pytest.fixture(scope="module")
def pool():
    """One for all tests that may find it with another process than they left it with: to start one takes a second."""
    with closing(MathVerifier(timeout_s=0.5)) as made:
        yield made


def test_results_are_in_the_order_of_the_questions_and_closing_ends_the_process():
    with closing(MathVerifier(timeout_s=2.0)) as pool:
        assert pool.equal(EASY * 4) == RIGHT * 4
        pid = pool.pid
        assert pool.equal(EASY[::-1]) == RIGHT[::-1]
        assert pool.pid == pid
    assert pool.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_sees_nothing_of_its_owners_environment_but_where_to_import_from(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    with closing(MathVerifier(timeout_s=2.0)) as pool:
        assert pool.equal(EASY) == RIGHT
        pid = pool.pid
        entries = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    seen = dict(entry.split("=", 1) for entry in entries)
    assert set(seen) == {"PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH"}
    assert "secret" not in seen.values()


def cpu_s(pid: int) -> float:
    """Returns what a process, or all that ended (0), have used."""
    if pid == 0:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("answer", ENDLESS)
def test_an_endless_question_costs_its_limit_and_counts_as_not_equal(pool, answer):
    pool.equal(EASY[:1])
    pid = pool.pid
    before_s = cpu_s(pid) + cpu_s(0)
    assert pool.equal([(answer, "1"), *EASY]) == [False, *RIGHT]  # and the next ones are answered all the same
    assert cpu_s(0) - before_s < 0.5 + 0.2  # the kernel counts in ticks of up to 10 ms
    assert pid != pool.pid


def test_a_worker_killed_between_questions_is_replaced(pool):
    pool.equal(EASY)
    pid = pool.pid
    os.kill(pid, signal.SIGKILL)
    assert pool.equal(EASY) == RIGHT
    assert pool.pid != pid


def test_a_worker_killed_at_work_changes_no_result():
    with closing(MathVerifier(timeout_s=30.0)) as pool:
        pool.equal(EASY[:1])
        pid = pool.pid
        killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
        killer.start()
        pairs = [(f"{i}.5", f"{2 * i + 1}/2") for i in range(400)]  # takes half a second or more
        assert pool.equal(pairs) == [True] * len(pairs)
        killer.join()
        assert pool.pid != pid


def test_a_question_that_every_worker_dies_of_counts_as_not_equal(monkeypatch, caplog):
    def killed(process, most_s):
        found = line(process, most_s)
        process.kill()
        return found if found == b"ready\n" else b""

    line = verifier._line
    with closing(verifier.MathVerifier(timeout_s=60.0)) as pool, monkeypatch.context() as patch:
        patch.setattr(verifier, "_line", killed)
        assert pool.equal([("1/2", "0.5")]) == [False]
        assert [record.args[0] for record in caplog.records] == [-signal.SIGKILL] * 3


def test_a_pool_that_cannot_start_says_why(monkeypatch, tmp_path):
    pool = MathVerifier(timeout_s=0.5)
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such library here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerError, match=r"3 processes in a row ended while they started.*no such library here"):
        pool.equal(EASY)
    monkeypatch.undo()
    with closing(pool):
        assert pool.equal(EASY) == RIGHT


def test_workers_end_with_their_owner_even_if_that_is_killed():
    code = (
        "from rlinf_embodied.reasoning.verifier import MathVerifier\n"
        "pool = MathVerifier(2.0)\nassert pool.equal([('1/2', '0.5')]) == [True]\n"
        "print(pool.pid, flush=True)\nimport time; time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        owner.kill()
    deadline_s = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
