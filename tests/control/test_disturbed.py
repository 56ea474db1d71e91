"""A run that learns from transitions and loses a worker ends with the weights and metrics of an undisturbed one."""

from __future__ import annotations

import pytest
from control_runs import RLPD, reach, small
from runs import drawing, metric_rows
from training_faults import lost, once

from rlinf_embodied.embodied import job as job_module
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.embodied.replay_stage import ReplayStage
from rlinf_embodied.training.trainer import Trainer

SHORT = ["eval.num_episodes=2", "eval.num_envs=2", "checkpoint.every=4"]
KINDS = {"sac": lambda *words: small(*words), "rlpd": lambda *words: reach(*RLPD, *words)}


def trained(folder, kind: str) -> object:
    """Returns the rows of a run's metrics; the digest of its weights is in its summary."""
    config = KINDS[kind](f"run.dir={folder}", *SHORT)
    with drawing(job_module, False):
        assert Trainer(EmbodiedJob(config)).run() == 0
    return metric_rows(folder), (folder / "checkpoints" / "latest" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the outcome of an undisturbed run."""
    made: dict[str, object] = {}

    def run(kind: str) -> object:
        if kind not in made:
            made[kind] = trained(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "stage", "method", "call", "after"),
    [
        ("sac", PolicyLearner, "run", 2, True),
        ("sac", ReplayStage, "run", 2, False),
        ("rlpd", EnvStage, "step", 16, False),
    ],
)
def test_what_a_fault_takes_is_run_again(tmp_path, monkeypatch, straight, kind, stage, method, call, after) -> None:
    expected = straight(kind)
    calls = once(monkeypatch, stage, method, call, lost(), after)
    assert trained(tmp_path, kind) == expected
    assert len(calls) > call + 1
