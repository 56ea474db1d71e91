"""A run in which a worker is lost ends as an undisturbed one; checkpoints that a run came from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from control_runs import small
from math_runs import PPO, sft, tiny_math
from runs import BEHIND, SFT, short, tiny, train
from stopped_runs import same_end, straight_runs
from training_faults import lost, once

from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.evaluation import EvaluationEnvStage
from rlinf_embodied.embodied.fine_tuning import FineTuningLearner
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.embodied.replay_stage import ReplayStage
from rlinf_embodied.reasoning.actor_stage import ActorStage
from rlinf_embodied.reasoning.critic_stage import CriticStage
from rlinf_embodied.reasoning.evaluation import AnswerStage
from rlinf_embodied.reasoning.fine_tuning import FineTuningStage
from rlinf_embodied.reasoning.generation_stage import GenerationStage
from rlinf_embodied.training.resume import outliving

MATH = ["checkpoint.every=2", "eval.num_problems=8", "eval.num_samples=0"]
LORA = ["policy.lora.rank=4", "algorithm.lr=1e-2"]
RUNS: dict[str, Callable[..., TrainConfig | MathConfig]] = {
    "ppo": lambda *words: short("env.carry_over=true", *words),
    "ahead": lambda *words: short(*BEHIND, *words),
    "sac": small,
    "fine-tuning": lambda *words: tiny(*SFT, "warm_start.num_demos=8", *words),
    "math, lora": lambda *words: tiny_math(*MATH, *LORA, *words),
    "math, ppo": lambda *words: tiny_math(*MATH, *PPO, *words),
    "math, fine-tuning": sft,
}
APART = ["plan=disaggregated", "cluster.num_devices=3"]
# the method of a stage in which a worker is lost: at which call, before or after its work
FAULTS = {
    "the first evaluation": ("ppo", [], EvaluationEnvStage, "close", 0, False),
    "an update, after it": ("ppo", [], PolicyLearner, "run", 2, True),
    "a later snapshot": ("ppo", [], PolicyLearner, "export_snapshot", 2, False),
    "a checkpoint": ("ppo", [], PolicyLearner, "save", 1, False),
    "the set-up": ("ppo", [], PolicyLearner, "setup", 0, True),
    "an update behind": ("ahead", [], PolicyLearner, "run", 2, True),
    "a rollout ahead": ("ahead", APART, EnvStage, "step", 11, True),
    "the transitions": ("sac", [], ReplayStage, "run", 2, True),
    "a checkpoint of critics": ("sac", [], PolicyLearner, "save", 1, False),
    "an epoch of the whole policy": ("fine-tuning", [], FineTuningLearner, "run", 0, True),
    "an epoch of the head": ("fine-tuning", [], FineTuningLearner, "run", 2, True),
    "generation with adapters": ("math, lora", [], GenerationStage, "run", 2, True),
    "the critic's update": ("math, ppo", [], CriticStage, "run", 1, True),
    "the actor's update with a critic": ("math, ppo", [], ActorStage, "run", 1, True),
    "the last evaluation": ("math, lora", [], AnswerStage, "run", 1, False),
    "steps of a language model": ("math, fine-tuning", [], FineTuningStage, "run", 2, True),
}
SLOW = ("an epoch of the head", "generation with adapters", "the critic's update", "the actor's update with a critic")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder of an undisturbed run."""
    return straight_runs(tmp_path_factory, lambda folder, run: train(RUNS[run](f"run.dir={folder}")), "ppo")


@pytest.mark.parametrize("fault", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_what_a_fault_takes_is_run_again(tmp_path: Path, monkeypatch, straight, fault: str) -> None:
    run, words, kind, method, call, after = FAULTS[fault]
    undisturbed = straight(run)
    calls = once(monkeypatch, kind, method, call, lost(), after)
    train(RUNS[run](f"run.dir={tmp_path}", *words))
    assert len(calls) > call + 1
    same_end(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_fine_tuning_of_a_warm_start_is_made_again(tmp_path: Path, monkeypatch, straight) -> None:
    undisturbed = straight("math, lora")
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path / "cache"))
    calls = once(monkeypatch, FineTuningStage, "run", 2, lost())
    train(RUNS["math, lora"](f"run.dir={tmp_path / 'run'}"))
    same_end(tmp_path / "run", undisturbed)
    assert len(calls) > 3


def checkpoint(folder: Path, text: str) -> Path:
    (folder / "training_state").mkdir(parents=True)
    (folder / "training_state" / "moments").write_text(text)
    return folder


def test_a_checkpoint_of_the_run_itself_is_kept_beside_it_and_one_of_another_run_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = checkpoint(run / "checkpoints" / "step_000001", "one")
    (run / "checkpoints" / "latest").symlink_to(first.name, target_is_directory=True)
    kept = outliving(run / "checkpoints" / "latest", run)
    assert not kept.is_symlink()
    shutil.rmtree(first)
    assert (kept / "training_state" / "moments").read_text() == "one"
    assert outliving(kept, run) == kept
    second = outliving(checkpoint(run / "checkpoints" / "step_000002", "two"), run)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", second.name]
    other = checkpoint(tmp_path / "other", "two")
    assert outliving(other, run) == other
