"""A run in which workers are lost ends with the weights and metrics of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import metric_rows, tiny, train
from training_faults import lost, once

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.evaluation import EvaluationEnvStage
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.errors import HangError, LostWorkerError, ObjectiveError, RlinfError, WorkerError

CARRIED = "env.carry_over=true"
SHORT = [
    *("run.num_iterations=3", "checkpoint.every=2", "env.num_envs=8", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *("eval.num_episodes=2", "eval.num_envs=2", "warm_start.from_scratch=true"),
    "recovery.snapshot_share=1",
]


def three(folder: Path, *overrides: str) -> TrainConfig:
    """Three short iterations, a checkpoint after the second."""
    return tiny(f"run.dir={folder}", *SHORT, *overrides)


# the method of a stage in which a worker is lost: at which call, before or after its work
PHASES = {
    "the first evaluation": (EvaluationEnvStage, "close", 0, False),
    "an update, after it": (PolicyLearner, "run", 2, True),
    "a later snapshot": (PolicyLearner, "export_snapshot", 2, False),
    "a checkpoint": (PolicyLearner, "save", 1, False),
    "the set-up": (PolicyLearner, "setup", 0, True),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(three(folder, CARRIED))


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_fault_takes_is_run_again(tmp_path, monkeypatch, straight, phase) -> None:
    folder, summary = straight
    kind, method, call, after = PHASES[phase]
    calls = once(monkeypatch, kind, method, call, lost(), after)
    found = train(three(tmp_path, CARRIED))
    assert len(calls) > call + 1
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert found["after"] == summary["after"]
    assert metric_rows(tmp_path) == metric_rows(folder)


def test_iterations_since_the_newest_snapshot_are_run_again(tmp_path, monkeypatch, straight) -> None:
    """As where a snapshot takes long beside an iteration, and is not taken after each one."""
    folder, summary = straight
    calls = once(monkeypatch, PolicyLearner, "run", 2, lost())
    found = train(three(tmp_path, CARRIED, "recovery.snapshot_share=1e-9"))
    assert len(calls) == 6  # three, the last of which fails, and all of them again
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert found["after"] == summary["after"]
    assert metric_rows(tmp_path) == metric_rows(folder)


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
