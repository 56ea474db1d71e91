"""What all benchmarks share: true spreads, goals that can be missed, arms in turn, one command line, one file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from experiments.bench import harness
from experiments.bench.harness import REPOSITORY, Benchmark, Child, Goal, Run, Spread, alternate, ratios
from rlinf_embodied.errors import WorkerError

TERMINATED = """
import sys, time
from dataclasses import dataclass
from experiments.bench.harness import Benchmark

@dataclass
class Options:
    out: str = ""

def measure(run):
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)

Benchmark("sleeper", Options, measure).main([])
"""


def test_a_benchmark_that_is_terminated_ends_what_it_started():
    bench = subprocess.Popen([sys.executable, "-c", TERMINATED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    assert bench.stdout.readline() == "started\n"
    bench.terminate()
    assert bench.communicate()[0] == "cleaned up\n"
    assert bench.returncode == 143


def exit_code(benchmark: Benchmark, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(words)
    return ended.value.code


def test_ratios_are_taken_round_by_round():
    spread = ratios([10.0, 40.0], [5.0, 10.0])  # a slow round slows both sides: 2 and 4, not 25 / 7.5
    assert (spread.low, spread.high) == (2.0, 4.0)


def test_a_goal_reports_whether_it_is_reached():
    for ratio, verdict in ((20.0, "reached"), (10.0, "missed")):
        goal = Goal("speed", Spread.of([ratio]), 20.0)
        assert str(goal).endswith(f"goal 20: {verdict}")
        assert goal.to_json()["reached"] is (ratio >= 20.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 5
    share: float = 0.5
    quick: bool = False
    out: str = ""


def test_wrong_input_ends_with_two_and_what_is_found_is_printed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(harness.command, "use_one_thread_per_process", lambda: None)  # this process is the tests'

    def measure(run: Run[Options]) -> int:
        assert run.overrides == []
        run.write({"found": run.options.rounds})
        return 3

    benchmark = Benchmark("seven", Options, measure)
    assert exit_code(benchmark, "rounds=7", f"out={tmp_path / 'r'}", "folder=x") == 2
    assert "folder is unknown" in capsys.readouterr().err
    assert exit_code(benchmark, "rounds=7", f"out={tmp_path / 'r'}") == 3
    assert capsys.readouterr().out == f"written to {tmp_path / 'r.json'}\n"
    written = json.loads((tmp_path / "r.json").read_text())
    assert (written["benchmark"], written["arguments"][0], written["found"]) == ("seven", "rounds=7", 7)
    assert written["machine"]["cores"] > 0


def test_arms_take_turns_and_every_other_round_goes_backwards(capsys):
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    found = alternate(arms, 2, warm_up=1)
    assert "".join(order) == "baabba"
    assert found == {"a": [3, 6], "b": [4, 5]}
    assert capsys.readouterr().out == "round 1/2\nround 2/2\n"


def test_a_child_that_fails_says_where_its_output_is(tmp_path):
    child = Child("arm b", [sys.executable, "-c", "raise SystemExit('no luck')"], tmp_path / "log.txt")
    with pytest.raises(WorkerError, match=r"(?s)arm b ended with exit code 1, see .*log.txt:\nno luck"):
        child.wait()
    Child("arm c", ["-m", "experiments.bench"], tmp_path / "c.txt").process.wait()
    assert "experiments.bench.__main__" in (tmp_path / "c.txt").read_text()  # found, though it is no command
