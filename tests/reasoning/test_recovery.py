"""A run of the reasoning workflow in which workers are lost ends with the weights of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from math_runs import PPO, tiny_math
from runs import metric_rows, train
from training_faults import lost, once

from rlinf_embodied.config import MathConfig
from rlinf_embodied.reasoning.actor_stage import ActorStage
from rlinf_embodied.reasoning.critic_stage import CriticStage
from rlinf_embodied.reasoning.evaluation import AnswerStage
from rlinf_embodied.reasoning.fine_tuning import FineTuningStage
from rlinf_embodied.reasoning.generation_stage import GenerationStage

LORA = ["policy.lora.rank=4", "algorithm.lr=1e-2"]
# variant, and the method in which a worker is lost: at which call, before or after its work
CASES = {
    "generation with adapters": (LORA, GenerationStage, "run", 2, True),
    "the critic's update": (PPO, CriticStage, "run", 1, True),
    "the actor's update with a critic": (PPO, ActorStage, "run", 1, True),
    "the last evaluation": (LORA, AnswerStage, "run", 1, False),
}


def three(folder: Path, *overrides: str) -> MathConfig:
    """Three iterations, a checkpoint after the second."""
    config = tiny_math("checkpoint.every=2", "eval.num_problems=8", "eval.num_samples=0", *overrides)
    config.run.dir = str(folder)
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder and the summary of a variant's undisturbed run."""
    made = {}

    def run(*variant: str) -> tuple[Path, dict]:
        if variant not in made:
            folder = tmp_path_factory.mktemp("straight")
            made[variant] = (folder, train(three(folder, *variant)))
        return made[variant]

    return run


SLOW = ("generation with adapters", "the critic's update", "the actor's update with a critic")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_what_a_fault_takes_is_run_again(tmp_path, monkeypatch, straight, case) -> None:
    variant, kind, method, call, after = CASES[case]
    folder, summary = straight(*variant)
    calls = once(monkeypatch, kind, method, call, lost(), after)
    found = train(three(tmp_path, *variant))
    assert len(calls) > call + 1
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert found["after"] == summary["after"]
    assert metric_rows(tmp_path) == metric_rows(folder)


@pytest.mark.slow
def test_a_fine_tuning_is_made_again(tmp_path, monkeypatch, straight) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path / "cache"))
    calls = once(monkeypatch, FineTuningStage, "run", 2, lost())
    assert train(three(tmp_path / "run", *LORA))["weights_sha256"] == straight(*LORA)[1]["weights_sha256"]
    assert len(calls) > 3
