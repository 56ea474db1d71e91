"""In a training of a language model that loses a worker only the blocks and updates that are lost are made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from deferred_session import DeferredSession, Fault
from math_runs import DAPO, PPO, TWO_STEPS, tiny_math, untimed_rows
from runs import drawing

from rlinf_embodied.config import MathConfig
from rlinf_embodied.reasoning import job as job_module
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.runtime.host import Call
from rlinf_embodied.training.trainer import Trainer

SHORT = ["eval.num_problems=8", "eval.num_samples=0", "checkpoint.every=2"]
LORA = ["policy.lora.rank=4", "algorithm.lr=1e-2"]
HURT = 1  # the iteration in which the worker is lost
ALL, FIRST = [0, 1, 2, 3], [0, 1]  # two of the four blocks are decoded together


def at(stage: str, method: str = "run", chunk: int = 0) -> Callable[[int, Call], bool]:
    """Returns what finds the first such call of the iteration."""

    def meets(number: int, call: Call) -> bool:
        when = call.step_context
        return (call.stage, call.method, when.iteration, when.chunk) == (stage, method, HURT, chunk)

    return meets


# plan, options; the fault; the blocks of generation, reward and actor that are made again, all rounds together
CASES = {
    "collocated, generation": ("collocated", [], Fault(at("generation")), (FIRST, FIRST, ALL)),
    "collocated, the update": ("collocated", LORA, Fault(at("actor"), after=True), (FIRST, FIRST, ALL)),
    "apart, generation": ("disaggregated", [], Fault(at("generation"), "error"), (ALL, ALL, ALL)),
    "apart, rewards": ("disaggregated", [], Fault(at("reward")), ([], ALL, ALL)),
    "apart, weights are received": ("disaggregated", LORA, Fault(at("generation", "install_weights")), ([], [], [])),
    "apart, weights are sent": ("disaggregated", LORA, Fault(at("actor", "export_weights")), ([], ALL, ALL)),
    "hybrid, in the midst of a batch": ("hybrid", [], Fault(at("reward", chunk=1)), ([], [1, 2, 3], ALL)),
    "hybrid, log-probs": ("hybrid", TWO_STEPS, Fault(at("old_log_probs", chunk=2)), ([], [2, 3], ALL)),
    "collocated, the critic": ("collocated", PPO, Fault(at("critic"), after=True), (FIRST, FIRST, ALL)),
    "pipelined, a late chunk": ("pipelined", [], Fault(at("actor", chunk=3)), ([], ALL, ALL)),
}


def train(config: MathConfig, session: DeferredSession) -> dict:
    """Returns the summary of a training in a session."""
    with drawing(job_module, False):
        assert Trainer(ReasoningJob(config), sessions=lambda cluster: session).run() == 0
    return json.loads((Path(str(config.run.dir)) / "summary.json").read_text())


def configured(folder: Path, *overrides: str) -> MathConfig:
    config = tiny_math(*SHORT, *overrides)
    config.run.dir = str(folder)
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder and the summary of an undisturbed run."""
    made: dict[tuple[str, ...], tuple[Path, dict]] = {}

    def run(options: list[str]) -> tuple[Path, dict]:
        if tuple(options) not in made:
            folder = tmp_path_factory.mktemp("straight")
            made[tuple(options)] = (folder, train(configured(folder, *options), DeferredSession()))
        return made[tuple(options)]

    return run


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_lost_is_made_again(tmp_path, straight, case) -> None:
    plan, options, fault, lost = CASES[case]
    folder, summary = straight(options)
    session = DeferredSession([fault])
    found = train(configured(tmp_path, f"plan={plan}", "cluster.num_devices=2", *options), session)
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert untimed_rows(tmp_path) == untimed_rows(folder)
    assert tuple(session.calls.of(stage, HURT, attempt=1) for stage in ("generation", "reward", "actor")) == lost
    (line,) = (tmp_path / "recoveries.jsonl").read_text().splitlines()
    assert json.loads(line)["repeated"] is not None


def test_rounds_that_were_decided_on_are_repeated_without_deciding_again(tmp_path, straight) -> None:
    folder, summary = straight(DAPO)
    asked = ["plan=collocated", "cluster.num_devices=2", *DAPO]

    def in_its_second_round(number: int, call: Call) -> bool:
        return (call.stage, call.step_context.iteration, call.step_context.round) == ("reward", HURT, 1)

    session = DeferredSession([Fault(in_its_second_round)])
    found = train(configured(tmp_path, *asked), session)
    assert session.faults[0].worker is not None
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert untimed_rows(tmp_path) == untimed_rows(folder)
    assert session.calls.of("generation", HURT, attempt=1)[:4] == [0, 0, 1, 1]  # of the first two rounds
