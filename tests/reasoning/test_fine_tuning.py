"""Fine-tuning as a run and as a warm start: what is learned, that it resumes, and the same model on every device."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from math_runs import TINY_MATH, sft, tiny_math
from runs import cluster, learned, metric_rows, train

from policies.causal_lm import CausalLM
from policies.text_codec import TextCodec
from rlinf_embodied.config import LanguagePolicyConfig, MathConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.checkpoint import weights_sha256
from rlinf_embodied.reasoning.fine_tuning import (
    NUM_BLOCKS,
    FineTuningStage,
    cache_folder,
    fine_tuning_of,
    starting_policy,
)
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession


def few(*overrides: str) -> MathConfig:
    return tiny_math(
        "warm_start.steps=12", "warm_start.num_examples=96", "warm_start.steps_per_iteration=5", *overrides
    )


# ------------------------------------------------------------------------------------------------------------- a run
@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(sft(f"run.dir={folder}"), draws=True)


def test_a_run_learns_and_leaves_a_policy_that_rl_starts_from(straight, tmp_path: Path) -> None:
    folder, summary = straight
    rows = metric_rows(folder)
    assert len(rows) == summary["iterations"] == 4
    for name in ("losses/imitation_loss", "losses/held_out_loss"):
        assert rows[-1][name] < rows[0][name] - 0.3
    assert summary["tokens"] == sum(row["losses/tokens"] for row in rows)
    assert {"accuracy_before", "accuracy_after"} <= set(summary)
    start = f"warm_start.checkpoint={folder}/checkpoints/latest"
    train(tiny_math(start, "run.num_iterations=1", "eval.num_samples=0", f"run.dir={tmp_path}"))


def files(folder: Path, mark: str) -> list[str]:
    """Writes problems, with their steps where a mark follows these; returns the overrides that name the files."""
    given = ["data.level=''"]
    for split, number in ((Split.train, 60), (Split.test, 6)):
        found = GeneratedProblems("sum1-2-9", 1).batch(split, 0, number)
        rows = {p.question: f"{p.solution}{mark}{p.answer}" if mark else p.answer for p in found}
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows.items()]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
        given.append(f"data.files.{split}={folder / f'{split}.jsonl'}")
    return given


@pytest.mark.parametrize("of_files", [False, True])
def test_the_number_of_workers_changes_neither_weights_nor_losses(tmp_path: Path, of_files: bool) -> None:
    config = sft(f"run.dir={tmp_path}/run", *(files(tmp_path, "####") if of_files else []))
    first, second = (learned(config, n) for n in (1, 2))
    assert first == second
    assert first[1]["losses/held_out_loss"] > 0


def test_files_without_worked_steps_are_refused_unless_none_are_asked_for(tmp_path: Path) -> None:
    given = files(tmp_path, "")
    with pytest.raises(ConfigError, match=r"chain_of_thought_share is 0.45, but no training problem .*or use 0"):
        train(sft(f"run.dir={tmp_path}/run", *given))
    assert (
        learned(sft(f"run.dir={tmp_path}/run", *given, "algorithm.chain_of_thought_share=0"), 1)[1]["losses/tokens"] > 0
    )


# ------------------------------------------------------------------------------------------------------ a warm start
def made(monkeypatch, cache: Path, config: MathConfig, devices: int = 1) -> tuple[str, list[tuple[int, int]]]:
    """Returns the hash of the model in a separate cache, and the (iteration, of) that were shown meanwhile."""
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(cache))
    shown = []
    folder = starting_policy(
        config, SerialSession(), cluster(devices), lambda _, done, of, __: shown.append((done, of))
    )
    return weights_sha256(CausalLM.from_config(LanguagePolicyConfig(), folder, 0).module.state_dict()), shown


def stuck(text: str, problem: Problem) -> str | None:
    time.sleep(60)


def test_a_tool_that_hangs_while_examples_are_made_is_named(monkeypatch, tmp_path) -> None:
    words = ("tool.timeout_s=0.5", "warm_start.tool_share=0.4", "data.level=chain1-2")
    with pytest.raises(ConfigError, match=r"tool.timeout_s is 0.5, but .*\.stuck, called with "):
        made(monkeypatch, tmp_path, few(f"tool._target_={__name__}.stuck", *words))


def test_the_number_of_devices_changes_no_bit_and_a_cached_model_is_not_made_again(monkeypatch, tmp_path) -> None:
    digest, shown = made(monkeypatch, tmp_path / "1", few())
    assert shown == [(1, 3), (2, 3), (3, 3)]
    for devices in (2, 5):
        assert made(monkeypatch, tmp_path / str(devices), few(), devices)[0] == digest
    assert made(monkeypatch, tmp_path / "1", few()) == (digest, [])
    assert not list(tmp_path.rglob("*.partial*"))


def test_a_warm_start_is_the_run_of_its_settings(monkeypatch, tmp_path: Path) -> None:
    digest, _ = made(monkeypatch, tmp_path / "cache", few("warm_start.chain_of_thought_share=0.45"))
    same = ["steps=12", "steps_per_iteration=5", f"lr={TINY_MATH['warm_start.lr']}"]
    train(sft(f"run.dir={tmp_path}/run", *(f"algorithm.{text}" for text in same)))
    policy = CausalLM.from_config(LanguagePolicyConfig(), tmp_path / "run/checkpoints/latest", 0)
    assert weights_sha256(policy.module.state_dict()) == digest


def test_each_setting_that_matters_has_a_model_of_its_own(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path))
    same = ["algorithm.lr=1", "generation.max_new_tokens=9", "data.seed=5", "policy.lora.rank=4", "eval.num_samples=1"]
    other = ["run.seed=4", "data.level=sum1-1-9", "policy.hidden_size=64", "warm_start.chain_of_thought_share=1"]
    folder = cache_folder(few(), exact_cpu=True)
    assert {cache_folder(few(text), exact_cpu=True) for text in same} == {folder}
    found = [cache_folder(few(text), exact_cpu=True) for text in other]
    assert len({folder, *found, cache_folder(sft(f"run.dir={tmp_path}"), exact_cpu=True)}) == 2 + len(other)


def alone(config: MathConfig) -> FineTuningStage:
    stage = FineTuningStage(StageConfig(fine_tuning_of(config), ""))
    stage.setup(solo_context(range(NUM_BLOCKS)))
    return stage


def test_it_learns_what_is_likely_and_says_what_it_was_trained_on(tmp_path) -> None:
    stage = alone(few("warm_start.steps_per_iteration=1"))
    losses = [stage.run(StepContext(step), {}).report["losses/imitation_loss"] for step in range(12)]
    assert losses[0] == pytest.approx(math.log(24), rel=0.2)  # 25 tokens without <pad>, nearly uniform
    assert losses[-1] < losses[0] - 0.3
    stage.save_policy(StepContext(0), str(tmp_path / "policy"))
    saved = json.loads((tmp_path / "policy/evaluation.json").read_text())
    assert saved["data"]["level"] == "sum1-2-9"


def test_every_example_is_used_once_per_epoch_and_none_is_held_out() -> None:
    config = few("warm_start.batch_size=16")
    stage, per_block = alone(config), 96 // NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        for epoch in range(2):
            rows = torch.cat([stage._rows(block, 6 * epoch + step) for step in range(6)])
            assert sorted(rows.tolist()) == list(range(per_block))
    taken = {stage._policy.codec.decode(prompt) for block in range(NUM_BLOCKS) for prompt, *_ in stage._examples[block]}
    held_out = GeneratedProblems("sum1-2-9", config.data.seed).batch(Split.test, 0, 200)
    assert not taken & {problem.question for problem in held_out}


def test_calls_of_a_tool_that_a_chat_template_cannot_write_are_refused(monkeypatch) -> None:
    calls = ["tool._target_=experiments.examples.calculator.calculate", "warm_start.tool_share=0.5"]
    assert any(any(given) for _, _, given in alone(few(*calls))._examples[0])
    monkeypatch.setattr(TextCodec, "encode_next_turn", lambda self, tokens, chat: None)
    with pytest.raises(ConfigError, match=r"warm_start\.tool_share is 0\.5, but the model's chat template"):
        alone(few(*calls))


def test_examples_that_do_not_fit_are_left_out() -> None:
    stage = alone(few("warm_start.tokens_per_microbatch=16"))
    assert max(len(prompt) + len(row) for prompt, row, _ in stage._examples[0]) <= 16
    with pytest.raises(ConfigError, match=r"warm_start.batch_size is 32, but .*use a smaller one"):
        alone(few("warm_start.tokens_per_microbatch=4"))
