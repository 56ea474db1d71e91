"""A run of two levels that loses a worker ends with the weights of an undisturbed one, those of both levels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from deferred_session import DeferredSession, Fault
from hierarchical_runs import placed, two_levels
from runs import drawing, metric_rows, train
from safetensors.torch import load_file
from training_faults import lost, once

from rlinf_embodied.embodied import job as job_module
from rlinf_embodied.embodied.actor_stage import ActorStage
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.runtime.host import Call
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.training.trainer import Trainer

SHORT = [
    *("run.num_iterations=3", "checkpoint.every=3", "eval.num_episodes=2", "eval.num_envs=2"),
    *("env.num_envs=8", "env.carry_over=true", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *("hierarchy.algorithm.epochs=1", "hierarchy.algorithm.value_epochs=1", "warm_start.from_nothing=true"),
]
HURT = 1  # the iteration in which the worker is lost
PLANS = {
    "collocated": (2, placed("all", "all", "all", "all")),
    "disaggregated": (4, placed([0], [1], [2], [3], shards=2)),
}


def at(stage: str, method: str, chunk_step: int = 0) -> Callable[[int, Call], bool]:
    """Returns what finds the first such call of the iteration."""
    wanted = (stage, method, HURT, chunk_step)
    return lambda number, call: (
        (
            call.stage,
            call.method,
            call.step_context.iteration,
            call.step_context.chunk_step,
        )
        == wanted
    )


CASES = {
    "the rollout": ("collocated", Fault(at("env", "loop"))),
    "a decision": ("disaggregated", Fault(at("policy", "step", 2))),
    "the high level's update": ("disaggregated", Fault(at("high_actor", "run"))),
    "weights are received": ("disaggregated", Fault(at("policy", "install_weights"), after=True)),
}


def trained(folder: Path, plan: str, session: Session) -> dict:
    """Returns the summary of a run in a session under a plan."""
    devices, tree = PLANS[plan]
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"name": plan, "trees": [{"min_devices": devices, "tree": tree}]}))
    config = two_levels(f"run.dir={folder / 'run'}", f"plan={path}", f"cluster.num_devices={devices}", *SHORT)
    with drawing(job_module, False):
        assert Trainer(EmbodiedJob(config), sessions=lambda cluster: session).run() == 0
    return json.loads((folder / "run" / "summary.json").read_text())


def weights(folder: Path) -> dict[str, dict]:
    """Returns the tensors of both policies in a run's newest checkpoint, as lists."""
    newest = folder / "checkpoints" / "latest"
    found = {name: load_file(newest / name / "model.safetensors") for name in (".", "high")}
    return {name: {key: tensor.tolist() for key, tensor in tensors.items()} for name, tensors in found.items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the summary of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("straight")
    return folder / "run", trained(folder, "collocated", SerialSession())


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_loses_a_worker_ends_with_the_same_weights(tmp_path, straight, case) -> None:
    plan, fault = CASES[case]
    folder, summary = straight
    found = trained(tmp_path, plan, DeferredSession([Fault(fault.meets, fault.kind, fault.after)]))
    assert found["weights_sha256"] == summary["weights_sha256"]  # of both levels
    assert weights(tmp_path / "run") == weights(folder)
    assert metric_rows(tmp_path / "run") == metric_rows(folder)
    assert len((tmp_path / "run" / "recoveries.jsonl").read_text().splitlines()) == 1


def test_a_checkpoint_that_fails_is_written_again(tmp_path, monkeypatch, straight) -> None:
    folder, summary = straight
    calls = once(monkeypatch, ActorStage, "state_part", 0, lost(), after=True)
    found = train(two_levels(f"run.dir={tmp_path}", *SHORT))
    assert len(calls) > 1
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert weights(tmp_path) == weights(folder)
