"""In a training that loses a worker in an iteration only the blocks and updates that are lost are made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from deferred_session import DeferredSession, Fault
from runs import drawing, metric_rows, tiny

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied import job as job_module
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.runtime.host import Call
from rlinf_embodied.training.checkpoints import Checkpoints
from rlinf_embodied.training.trainer import Trainer

SHORT = [
    *("run.num_iterations=3", "checkpoint.every=1", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *("eval.num_episodes=2", "eval.num_envs=2", "warm_start.from_nothing=true"),
]
CARRIED = ["env.carry_over=true"]
HURT = 1  # the iteration in which the worker is lost
ALL, FIRST, LAST = [0, 1, 2, 3], [0, 1], [2, 3]


def at(stage: str, method: str, chunk_step: int = 0) -> Callable[[int, Call], bool]:
    """Returns what finds the first such call of the iteration."""

    def meets(number: int, call: Call) -> bool:
        when = call.step_context
        return (call.stage, call.method, when.iteration, when.chunk_step) == (stage, method, HURT, chunk_step)

    return meets


# plan, devices, options; the fault; the blocks of env, policy and actor that are made again
CASES = {
    "collocated, the rollout": ("collocated", 2, [], Fault(at("env", "loop")), (FIRST, FIRST, ALL)),
    "collocated, after the rollout": ("collocated", 2, [], Fault(at("env", "loop"), after=True), (FIRST, FIRST, ALL)),
    "collocated, the update": ("collocated", 2, CARRIED, Fault(at("actor", "run")), (FIRST, FIRST, ALL)),
    "collocated, an exception": ("collocated", 4, [], Fault(at("actor", "run"), "error"), ([0], [0], ALL)),
    "apart, the env's rollout": ("disaggregated", 3, CARRIED, Fault(at("env", "step", 2)), (ALL, ALL, ALL)),
    "apart, the policy's rollout": ("disaggregated", 3, CARRIED, Fault(at("policy", "step", 2)), (ALL, ALL, ALL)),
    "apart, the update": ("disaggregated", 3, CARRIED, Fault(at("actor", "run"), after=True), ([], [], ALL)),
    "apart, weights are received": ("disaggregated", 3, CARRIED, Fault(at("policy", "install_weights")), ([], [], [])),
    "apart, weights are sent": ("disaggregated", 3, CARRIED, Fault(at("actor", "export_weights")), ([], [], ALL)),
    "in pairs, the rollout": (
        "disaggregated",
        6,
        CARRIED,
        Fault(at("env", "step", 3), after=True),
        (FIRST, FIRST, ALL),
    ),
    "hybrid, the update": ("hybrid", 2, CARRIED, Fault(at("actor", "run"), "error", after=True), (ALL, ALL, ALL)),
    "hybrid, the rollout": ("hybrid", 4, CARRIED, Fault(at("env", "step", 1)), (FIRST, FIRST, ALL)),
}


def train(config: TrainConfig, session: DeferredSession) -> dict:
    """Returns the summary of a training in a session."""
    with drawing(job_module, False):
        assert Trainer(EmbodiedJob(config), sessions=lambda cluster: session).run() == 0
    return json.loads((Path(str(config.run.dir)) / "summary.json").read_text())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder and the summary of an undisturbed run."""
    made: dict[tuple[str, ...], tuple[Path, dict]] = {}

    def run(options: list[str]) -> tuple[Path, dict]:
        if tuple(options) not in made:
            folder = tmp_path_factory.mktemp("straight")
            config = tiny(f"run.dir={folder}", "plan=collocated", *SHORT, *options)
            made[tuple(options)] = (folder, train(config, DeferredSession()))
        return made[tuple(options)]

    return run


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_lost_is_made_again(tmp_path, straight, case) -> None:
    plan, devices, options, fault, lost = CASES[case]
    folder, summary = straight(options)
    session = DeferredSession([Fault(fault.meets, fault.kind, fault.after)])
    chosen = [f"plan={plan}", f"cluster.num_devices={devices}", *SHORT, *options]
    found = train(tiny(f"run.dir={tmp_path}", *chosen), session)
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)
    assert tuple(session.calls.of(stage, HURT, attempt=1) for stage in ("env", "policy", "actor")) == lost
    (line,) = (tmp_path / "recoveries.jsonl").read_text().splitlines()
    told = json.loads(line)
    names = zip(("env", "policy", "actor"), lost, strict=True)
    assert told["repeated"] == {stage: len(blocks) for stage, blocks in names if blocks}
    assert (told["num_blocks"], told["work"]) == (4, f"iteration {HURT + 1}")


def test_what_is_lost_while_it_is_mended_is_mended_too(tmp_path, straight) -> None:
    folder, summary = straight(CARRIED)
    faults = [Fault(at("env", "loop")), Fault(at("actor", "import_snapshot"), "error", after=True)]
    chosen = ["plan=collocated", "cluster.num_devices=2", *SHORT, *CARRIED]
    found = train(tiny(f"run.dir={tmp_path}", *chosen), DeferredSession(faults))
    assert all(fault.worker is not None for fault in faults)
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)
    told = [json.loads(line)["repeated"] for line in (tmp_path / "recoveries.jsonl").read_text().splitlines()]
    assert told == [{}, {"env": 2, "policy": 2, "actor": 4}]


def test_a_checkpoint_that_is_lost_half_written_is_written_again_with_the_whole_iteration(
    tmp_path, straight, monkeypatch
) -> None:
    folder, summary = straight([])
    monkeypatch.setattr(Checkpoints, "is_written", lambda checkpoints, executor, lost: False)
    session = DeferredSession([Fault(at("actor", "run"))])
    chosen = ["plan=collocated", "cluster.num_devices=2", *SHORT]
    found = train(tiny(f"run.dir={tmp_path}", *chosen), session)
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)
    (line,) = (tmp_path / "recoveries.jsonl").read_text().splitlines()
    assert json.loads(line)["repeated"] is None
