"""Workers that are killed, stopped and made to fail in every phase change nothing about what is learnt."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from scripts import call

from experiments.chaos import compose_chaos
from rlinf_embodied import train
from rlinf_embodied.tools.chaos import AGAIN, FIRST, KINDS, Chaos, Fault, disturbed, report, schedule

ITERATIONS = ["run.num_iterations=3", "cluster.hang_after_s=5"]


def test_a_schedule_is_a_function_of_its_seed_and_has_every_kind_in_every_phase() -> None:
    faults = schedule(20, 7)
    assert faults == schedule(20, 7) != schedule(20, 8)
    again = [(phase, kind) for phase in AGAIN for kind in KINDS]
    assert Counter((f.phase, f.kind) for f in faults[2:]) == Counter(again)
    assert tuple(f.phase for f in faults[:2]) == FIRST
    assert len(schedule(50, 7)) == 50
    assert sum(f.phase == "tool" for f in schedule(23, 7, missing=[])) == 3


def test_the_next_fault_waits_until_the_run_has_recovered_from_the_one_before() -> None:
    made = Chaos([Fault("rollout", "SIGKILL", 0.0, 0.0), Fault("rollout", "SIGSTOP", 0.0, 0.0)])
    assert made.due("update", 0) is None
    first = made.due("rollout", 0)
    assert first is made.faults[0]
    made.happens(first, 0, "worker 0")
    assert made.due("rollout", 0) is None
    assert made.due("rollout", 1) is made.faults[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["workflow=control"], "workflow is 'control', but it is embodied, reasoning or episodes"),
        (["env.horizn=3"], "env.horizn is unknown"),
        (["faults"], "'faults' has no value: use faults=<value>"),
        (["faults=-1"], "faults is -1, but it must not be negative"),
        (["run.dir={there}"], "of an earlier comparison: use another run.dir"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(monkeypatch, capsys, tmp_path: Path, words, says) -> None:
    (tmp_path / "embodied-7").mkdir()
    code, _, err = call(monkeypatch, capsys, "chaos", *(word.format(there=tmp_path) for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


@pytest.mark.ray
@pytest.mark.parametrize(
    ("workflow", "faults"),
    [
        ("embodied", [("rollout", "SIGKILL"), ("update", "exception")]),
        pytest.param("embodied", [("update", "SIGKILL"), ("rollout", "SIGSTOP")], marks=pytest.mark.slow),
        pytest.param("reasoning", [("transfer", "SIGKILL"), ("checkpoint", "exception")], marks=pytest.mark.slow),
        pytest.param("episodes", [("rollout", "exception"), ("tool", "SIGKILL")], marks=pytest.mark.slow),
    ],
)
def test_the_weights_of_a_disturbed_run_are_those_of_an_undisturbed_one(tmp_path: Path, workflow, faults) -> None:
    config = compose_chaos([f"workflow={workflow}", f"run.dir={tmp_path}", *ITERATIONS])
    made = Chaos([Fault(phase, kind, 0.3, 0.05) for phase, kind in faults])
    straight = train(config.training_in("straight"))["weights_sha256"]
    assert disturbed(config.training_in("chaos"), made) == straight
    assert len(made.come) == len(faults)
    lines = (config.folder / "chaos/recoveries.jsonl").read_text().splitlines()
    assert len(lines) >= sum(phase != "tool" for phase, _ in faults)  # whose processes are started again by the tool
    assert {json.loads(line)["error"] for line in lines} <= {"LostWorkerError", "HangError", "WorkerError"}
    assert f"{len(faults)} of {len(faults)} faults injected" in report(made, config.folder / "chaos")


def test_a_dry_run_prints_the_training_with_an_iteration_for_each_fault(monkeypatch, capsys) -> None:
    code, out, _ = call(monkeypatch, capsys, "chaos", "faults=50", "run.dry=true")
    printed = yaml.safe_load(out)
    assert (code, printed["faults"], printed["training"]["env"]["num_envs"]) == (0, 50, 16)
    assert printed["training"]["run"]["num_iterations"] > 50
