"""The process answers in order, costs what its limits say, and is replaced when it ends."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import WorkerError
from rlinf_embodied.reasoning.reward_stage import Verifier

EASY = [("1/2", "0.5"), ("$\\frac{1}{3}$", "0.5"), ("$x=5$", "$5$"), ("$x+1$", "$1+x$"), ("2", "3")]
RIGHT = [True, False, True, True, False]
# each of these takes math-verify more than a second, most of them for ever
ENDLESS = ["9**9**9**9", "1 " * 300_000]


def limited(timeout_s: float) -> Verifier:
    return Verifier(PromptTemplate("compact"), RewardConfig(timeout_s=timeout_s))


def equal(verifier: Verifier, pairs: list[tuple[str, str]]) -> list[bool]:
    return [verifier.are_equal(*pair) for pair in pairs]


@pytest.fixture(scope="module")
def verifier():
    """One for all tests that may find it with another process than they left it with: to start one takes a second."""
    with limited(0.5) as made:
        yield made


def test_a_process_answers_in_order_and_sees_nothing_else_of_its_owners_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    with limited(2.0) as verifier:
        assert equal(verifier, EASY * 4) == RIGHT * 4
        pid = verifier.math_verify.pid
        assert equal(verifier, EASY[::-1]) == RIGHT[::-1]
        assert verifier.math_verify.pid == pid
        entries = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    assert {entry.partition("=")[0] for entry in entries} == {"PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH"}
    assert verifier.math_verify.pid is None
    assert not Path(f"/proc/{pid}").exists()


def cpu_s() -> float:
    """Returns what all processes that ended have used."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


@pytest.mark.parametrize("answer", ENDLESS)
def test_an_endless_question_costs_its_limit_and_counts_as_not_equal(verifier, answer):
    equal(verifier, EASY[:1])
    pid, tick = verifier.math_verify.pid, os.sysconf("SC_CLK_TCK")
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    before_s = (int(times[11]) + int(times[12])) / tick + cpu_s()
    assert equal(verifier, [(answer, "1"), *EASY]) == [False, *RIGHT]  # and the next ones are answered all the same
    assert cpu_s() - before_s < 0.5 + 0.2  # the kernel counts in ticks of up to 10 ms
    assert pid != verifier.math_verify.pid


def test_a_worker_killed_at_work_or_between_questions_changes_no_result(verifier):
    equal(verifier, EASY[:1])
    pid = verifier.math_verify.pid
    killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    killer.start()
    pairs = [(f"{i}.5", f"{2 * i + 1}/2") for i in range(400)]  # takes half a second or more
    assert equal(verifier, pairs) == [True] * len(pairs)
    killer.join()
    assert verifier.math_verify.pid != pid
    os.kill(verifier.math_verify.pid, signal.SIGKILL)
    assert equal(verifier, EASY) == RIGHT


def test_a_question_that_every_worker_dies_of_counts_as_not_equal(monkeypatch, caplog):
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(killed, **options))
    assert equal(limited(60.0), [("1/2", "0.5")]) == [False]
    assert [record.args[1] for record in caplog.records] == [-signal.SIGKILL] * 3


def test_a_process_that_cannot_start_is_an_error(monkeypatch, tmp_path, capfd):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such library here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerError, match=r"the verifier's process ended with status 1"):
        equal(limited(0.5), EASY)
    assert "no such library here" in capfd.readouterr().err


def test_workers_end_with_their_owner_even_if_that_is_killed():
    code = (
        "from rlinf_embodied.data.prompt_templates import PromptTemplate\n"
        "from rlinf_embodied.reasoning.reward_stage import Verifier\n"
        "verifier = Verifier(PromptTemplate('compact'))\nassert verifier.are_equal('1/2', '0.5')\n"
        "print(verifier.math_verify.pid, flush=True)\nimport time; time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
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
