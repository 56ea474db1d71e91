"""Fine-tuning: the same model on every number of devices, made once, whole, and not on what is held out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from math_runs import tiny_math
from runs import cluster

from policies.causal_lm import CausalLM
from rlinf_embodied.config import MathConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Split
from rlinf_embodied.learning.checkpoint import weights_sha256
from rlinf_embodied.reasoning.fine_tuning import NUM_BLOCKS, FineTuningStage, cache_folder, starting_policy
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession


def few(*overrides: str) -> MathConfig:
    return tiny_math("warm_start.steps=12", "warm_start.num_examples=96", *overrides)


def made(monkeypatch, cache: Path, config: MathConfig, devices: int = 1) -> tuple[str, list[tuple[int, int]]]:
    """Returns the hash of the model in a separate cache, and the (step, of) that were shown while it was made."""
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(cache))
    shown = []
    folder = starting_policy(
        config, SerialSession(), cluster(devices), lambda _, done, of, __: shown.append((done, of))
    )
    return weights_sha256(CausalLM.load(folder).module.state_dict()), shown


def test_the_number_of_devices_changes_no_bit_and_a_cached_model_is_not_made_again(monkeypatch, tmp_path) -> None:
    digest, shown = made(monkeypatch, tmp_path / "1", few())
    assert shown[-1] == (12, 12)
    for devices in (2, 5):
        assert made(monkeypatch, tmp_path / str(devices), few(), devices)[0] == digest
    assert made(monkeypatch, tmp_path / "1", few()) == (digest, [])
    assert not list(tmp_path.rglob("*.partial*"))


def test_each_setting_that_matters_has_a_model_of_its_own(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path))
    same = ["algorithm.lr=1", "generation.max_new_tokens=9", "data.seed=5", "policy.lora.rank=4", "eval.num_samples=1"]
    other = ["run.seed=4", "data.level=sum1-1-9", "policy.hidden_size=64", "warm_start.chain_of_thought_share=1"]
    folder = cache_folder(few(), exact_cpu=True)
    assert {cache_folder(few(text), exact_cpu=True) for text in same} == {folder}
    found = [cache_folder(few(text), exact_cpu=True) for text in other]
    assert len({folder, *found}) == 1 + len(other)


def test_it_learns_what_is_likely_and_says_what_it_was_trained_on(monkeypatch, tmp_path) -> None:
    config = few()
    stage = FineTuningStage(config)
    stage.setup(solo_context(range(NUM_BLOCKS)))
    first, _, last = (stage.fit(StepContext(steps[0]), steps) for steps in ((0, 1), (1, 11), (11, 12)))
    assert first == pytest.approx(math.log(24), rel=0.2)  # 25 tokens without <pad>, nearly uniform
    assert last < first - 0.3
    stage.save_policy(StepContext(0), str(tmp_path / "policy"))
    saved = json.loads((tmp_path / "policy/evaluation.json").read_text())
    assert saved["data"]["level"] == "sum1-2-9"


def test_every_example_is_used_once_per_epoch_and_none_is_held_out() -> None:
    config = few("warm_start.batch_size=16")
    stage = FineTuningStage(config)
    stage.setup(solo_context(range(NUM_BLOCKS)))
    per_block = 96 // NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        for epoch in range(2):
            rows = torch.cat([stage._rows(block, 6 * epoch + step) for step in range(6)])
            assert sorted(rows.tolist()) == list(range(per_block))
    taken = {stage._policy.decode(prompt) for block in range(NUM_BLOCKS) for prompt in stage._examples[block].prompts}
    held_out = GeneratedProblems("sum1-2-9", config.data.seed).batch(Split.test, 0, 200)
    assert not taken & {problem.question for problem in held_out}
