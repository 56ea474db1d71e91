"""A run that is stopped, or loses a worker, ends as an undisturbed one; checkpoints that a run came from."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from control_runs import DAGGER, HG_DAGGER, RECAP, RLPD, reach, small
from hierarchical_runs import two_levels
from math_runs import DAPO, PPO, sft, tiny_math
from runs import BEHIND, FOUR, GRPO, SFT, TINY, short, tiny, train
from stopped_runs import interrupt_in, same_end, straight_runs
from training_faults import lost, once

from rlinf_embodied.compose import compose_export
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.evaluation import EvaluationEnvStage
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.fine_tuning import CloningLearner, FineTuningLearner
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.embodied.replay_stage import ReplayStage
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.reasoning.actor_stage import ActorStage
from rlinf_embodied.reasoning.critic_stage import CriticStage
from rlinf_embodied.reasoning.evaluation import AnswerStage
from rlinf_embodied.reasoning.fine_tuning import FineTuningStage
from rlinf_embodied.reasoning.generation_stage import GenerationStage
from rlinf_embodied.training.resume import outliving

MATH = ["checkpoint.every=2", "eval.num_problems=8", "eval.num_samples=0"]
CLONING = "algorithm.bc_coef=0.5"
LORA = ["policy.lora.rank=4", "algorithm.lr=1e-2"]
STALE = [
    *("algorithm.tis_cap=2.0", "algorithm.lr_end_fraction=1.0", "run.num_iterations=4"),
    *("checkpoint.every=1", "plan.max_staleness=2"),
]


@functools.cache
def dataset() -> str:
    """The folder of a LeRobot dataset of twelve episodes."""
    folder = tempfile.mkdtemp()
    env = [f"{key}={value}" for key, value in TINY.items() if key.startswith("env")]
    export_dataset(compose_export([*env, "policy=expert", "num_episodes=12", f"out={folder}/set"]), lambda *_: None)
    return f"{folder}/set"


RUNS: dict[str, Callable[..., TrainConfig | MathConfig]] = {
    "ppo": lambda *words: short("env.carry_over=true", *words),
    "grpo": lambda *words: tiny(*FOUR, *GRPO, *words),
    "cloning, ppo": lambda *words: tiny(*FOUR, CLONING, *words),
    "cloning, grpo": lambda *words: tiny(*FOUR, CLONING, *GRPO, *words),
    "cloning, flow": lambda *words: tiny(*FOUR, CLONING, "policy=flow_vla", "algorithm.ratio_level=chunk", *words),
    "ahead": lambda *words: short(*BEHIND, *words),
    "two levels": lambda *words: two_levels(*FOUR, *words),
    "sac": small,
    "rlpd": lambda *words: reach(*RLPD, *words),
    "dagger": lambda *words: reach(*DAGGER, *words),
    "hg_dagger": lambda *words: reach(*HG_DAGGER, *words),
    "recap": lambda *words: reach(*RECAP, *words),
    "fine-tuning": lambda *words: tiny(*SFT, "warm_start.num_demos=8", *words),
    "fine-tuning, dataset": lambda *words: tiny(*SFT, f"data={dataset()}", *words),
    "math": lambda *words: tiny_math(*MATH, *words),
    "math, lora": lambda *words: tiny_math(*MATH, *LORA, *words),
    "math, ppo, lora": lambda *words: tiny_math(*MATH, *PPO, *LORA, *words),
    "math, bfloat16": lambda *words: tiny_math(*MATH, "generation.precision=bfloat16", *words),
    "math, dapo": lambda *words: tiny_math(*MATH, *DAPO, *words),
    "math, ahead": lambda *words: tiny_math(*MATH, *DAPO, *STALE, *words),
    "math, fine-tuning": sft,
}
APART = ["plan=disaggregated", "cluster.num_devices=3"]
TOGETHER = ["plan=collocated", "cluster.num_devices=2"]
HALVES = ["plan=disaggregated", "cluster.num_devices=2"]
# in which iteration, from 0, a run is stopped, and what its continuation changes
STOPS = [
    *((f"cloning, {objective}", 1, TOGETHER) for objective in ("ppo", "grpo", "flow")),
    *(("ppo", 1, HALVES), ("grpo", 1, HALVES), ("ahead", 0, APART), ("ahead", 2, APART), ("two levels", 1, [])),
    *(("sac", 1, HALVES), ("rlpd", 1, []), ("hg_dagger", 1, []), ("recap", 1, []), ("dagger", 1, [])),
    *(("fine-tuning", 0, []), ("fine-tuning", 2, []), ("math, fine-tuning", 0, []), ("math, fine-tuning", 2, [])),
    *(("math", 1, HALVES), ("math, ppo, lora", 1, HALVES), ("math, dapo", 1, HALVES), ("math, ahead", 1, HALVES)),
    ("math, bfloat16", 1, HALVES),
    ("fine-tuning, dataset", 2, []),
]
HELD = {"ppo": {"carry_over"}, "math, ppo, lora": {"critic_module", "policy_module"}}  # of these, by the checkpoint
# the method of a stage in which a worker is lost: at which call, before or after its work
FAULTS = {
    "the first evaluation": ("ppo", [], EvaluationEnvStage, "close", 0, False),
    "an update, after it": ("ppo", [], PolicyLearner, "run", 2, True),
    "a later snapshot": ("ppo", [], PolicyLearner, "export_snapshot", 2, False),
    "a checkpoint": ("ppo", [], PolicyLearner, "save", 1, False),
    "the set-up": ("ppo", [], PolicyLearner, "setup", 0, True),
    **{
        f"an update with cloning, {objective}": (f"cloning, {objective}", [], CloningLearner, "run", 2, True)
        for objective in ("ppo", "grpo", "flow")
    },
    "an update behind": ("ahead", [], PolicyLearner, "run", 2, True),
    "a rollout ahead": ("ahead", APART, EnvStage, "step", 11, True),
    "the lower level's update": ("two levels", [], PolicyLearner, "run", 3, False),
    "the transitions": ("sac", [], ReplayStage, "run", 2, True),
    "a checkpoint of critics": ("sac", [], PolicyLearner, "save", 1, False),
    "an epoch of the whole policy": ("fine-tuning", [], FineTuningLearner, "run", 0, True),
    "an epoch of the head": ("fine-tuning", [], FineTuningLearner, "run", 2, True),
    "generation with adapters": ("math, lora", [], GenerationStage, "run", 2, True),
    "the critic's update": ("math, ppo, lora", [], CriticStage, "run", 1, True),
    "the actor's update with a critic": ("math, ppo, lora", [], ActorStage, "run", 1, True),
    "the last evaluation": ("math, lora", [], AnswerStage, "run", 1, False),
    "steps of a language model": ("math, fine-tuning", [], FineTuningStage, "run", 2, True),
}
SLOW_RUNS = ("dagger", "fine-tuning", "math, dapo")
SLOW = ("an epoch of the head", "generation with adapters", "the critic's update", "the actor's update with a critic")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder of an undisturbed run."""
    return straight_runs(tmp_path_factory, lambda folder, run: train(RUNS[run](f"run.dir={folder}")), "ppo")


@pytest.mark.parametrize(
    ("run", "stopped_in", "words"),
    [pytest.param(*stop, marks=[pytest.mark.slow] * (stop[0] in SLOW_RUNS)) for stop in STOPS],
)
def test_a_stopped_run_resumed_under_another_plan_ends_as_one_that_never_stopped(
    straight, monkeypatch, tmp_path: Path, run: str, stopped_in: int, words: list[str]
) -> None:
    undisturbed = straight(run)
    with monkeypatch.context() as patch:
        interrupt_in(patch, stopped_in)
        assert train(RUNS[run](f"run.dir={tmp_path}"), code=130) == {}
    latest = tmp_path / "checkpoints/latest"
    assert latest.resolve().name == f"step_{stopped_in + 1:06d}"
    if run in HELD or run in ("grpo", "math"):
        held = {name for name in ("carry_over", "critic_module", "policy_module") if load_tensors(latest, name)}
        assert held == HELD.get(run, set())
        assert (latest / "adapter/adapter_model.safetensors").exists() == ("lora" in run)
    train(RUNS[run](f"run.dir={tmp_path}", *words))
    same_end(tmp_path, undisturbed)


@pytest.mark.parametrize("make", [lambda *words: tiny("plan=collocated", *words), tiny_math])
def test_samples_of_earlier_weights_have_to_be_corrected_for(tmp_path: Path, make) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tis_cap is None, but with a staleness of 1.*tis_cap=2\.0"):
        train(make("plan.max_staleness=1", "algorithm.tis_cap=null", f"run.dir={tmp_path}/run"))
    assert list(tmp_path.iterdir()) == []


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
