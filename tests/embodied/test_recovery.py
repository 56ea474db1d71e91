"""How often, and after which errors, a run begins an iteration again, and from where."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import metric_rows, short, train
from training_faults import lost, once

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.errors import HangError, LostWorkerError, ObjectiveError, RlinfError, WorkerError
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.training import running

CARRIED = "env.carry_over=true"


def three(folder: Path, *overrides: str) -> TrainConfig:
    """Three short iterations, a checkpoint after the second."""
    return short(f"run.dir={folder}", *overrides)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(three(folder, CARRIED))


def test_iterations_since_the_newest_snapshot_are_run_again(tmp_path, monkeypatch, straight) -> None:
    """As where a snapshot takes long beside an iteration, and is not taken after each one."""
    folder, summary = straight
    calls = once(monkeypatch, PolicyLearner, "run", 2, lost())
    found = train(three(tmp_path, CARRIED, "recovery.snapshot_share=1e-9"))
    assert len(calls) == 6  # three, the last of which fails, and all of them again
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert found["after"] == summary["after"]
    assert metric_rows(tmp_path) == metric_rows(folder)


@pytest.mark.parametrize(
    ("memory", "fails", "calls"),
    [((0,), 2, 4), ((0,), 1, 5), ((1e15, 0), 1, 5), ((1e15, 1e15, 0), 2, 4)],
    ids=["after a checkpoint", "before any", "an earlier snapshot", "dropped at a checkpoint"],
)
def test_without_room_for_snapshots_a_run_recovers_from_its_newest_checkpoint(
    tmp_path, monkeypatch, straight, memory: tuple[float, ...], fails: int, calls: int
) -> None:
    sizes, kept = iter(memory), []
    monkeypatch.setattr(running, "host_memory_bytes", lambda: next(sizes, 0))
    monkeypatch.setattr(SerialSession, "secure", lambda self, refs: kept.append(refs))
    made = once(monkeypatch, PolicyLearner, "run", fails, lost())
    found = train(three(tmp_path, CARRIED))
    assert len(made) == calls
    assert len(kept) == memory.count(1e15)
    assert found["weights_sha256"] == straight[1]["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(straight[0])
    assert "none are kept, and a lost worker costs" in (tmp_path / "console.log").read_text()


def test_a_resumed_run_recovers_though_its_checkpoint_is_dropped(tmp_path, monkeypatch, straight) -> None:
    short = ["run.num_iterations=1", "checkpoint.every=1", "checkpoint.keep=1", CARRIED]
    train(three(tmp_path, *short))
    calls = once(monkeypatch, PolicyLearner, "run", 1, lost())
    found = train(three(tmp_path, "checkpoint.every=1", "checkpoint.keep=1", CARRIED))
    assert len(calls) == 3  # two iterations, one of them twice
    assert found["weights_sha256"] == straight[1]["weights_sha256"]


def test_the_same_error_twice_is_no_accident(tmp_path, monkeypatch) -> None:
    error = WorkerError("worker 0 (pid 7) failed in actor.run: RuntimeError: a bug", (0,))
    calls: list[int] = []

    def run(*arguments):
        calls.append(1)
        raise error

    monkeypatch.setattr(PolicyLearner, "run", run)
    with pytest.raises(WorkerError, match="a bug"):
        train(three(tmp_path))
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [ObjectiveError, RlinfError])
def test_what_is_no_fault_of_the_machine_ends_the_run_at_once(tmp_path, monkeypatch, kind) -> None:
    calls = once(monkeypatch, PolicyLearner, "run", 1, kind("the ratio is not 1"))
    with pytest.raises(kind, match="not 1"):
        train(three(tmp_path))
    assert len(calls) == 2


@pytest.mark.parametrize("error", [LostWorkerError("worker 0 died", (0,)), HangError("worker 0 hangs", (0,))])
def test_a_run_with_too_many_faults_ends_and_can_be_resumed(tmp_path, monkeypatch, straight, error) -> None:
    run, number = PolicyLearner.run, []

    def failing(stage, step_context, inputs):
        if step_context.iteration == 1:
            number.append(1)
            raise error
        return run(stage, step_context, inputs)

    monkeypatch.setattr(PolicyLearner, "run", failing)
    with pytest.raises(type(error)) as caught:
        train(three(tmp_path, CARRIED, "recovery.max_restarts=3", "checkpoint.every=1"))
    assert len(number) == 4
    assert "recovery.max_restarts" in caught.value.__notes__[0]
    assert (tmp_path / "checkpoints" / "step_000001").is_dir()
    monkeypatch.undo()
    assert train(three(tmp_path, CARRIED))["weights_sha256"] == straight[1]["weights_sha256"]
