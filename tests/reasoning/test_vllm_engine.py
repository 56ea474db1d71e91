"""The vLLM engine against a stand-in with vLLM's interface; test_vllm_itself.py is about vLLM's own."""

from __future__ import annotations

import sys

import fake_vllm
import pytest
import torch
from language_models import language_model
from math_runs import tiny_math, train_math, untimed_rows

from rlinf_embodied.config import VllmConfig
from rlinf_embodied.errors import ConfigError, ObjectiveError
from rlinf_embodied.reasoning import vllm_engine
from rlinf_embodied.reasoning.batch import GenerationBlock, Noise, Prompt, SamplingParams, Sequences, all_log_probs
from rlinf_embodied.reasoning.vllm_engine import generate_with_vllm
from rlinf_embodied.telemetry.progress import progress_reported_to

PROMPTS = (Prompt(40, (5, 9, 2)), Prompt(7, (3, 4, 8, 8, 12)), Prompt(23, (6,)))
BLOCK = GenerationBlock(PROMPTS, group_size=4)
SAMPLING = SamplingParams(max_new_tokens=9, temperature=0.7)
NOISE = Noise(seed=3, iteration=2)
ENGINE = ["generation.engine=vllm", "run.exact=false", "eval.num_samples=0", "generation.vllm.dtype=float32"]


@pytest.fixture
def engine(monkeypatch):
    """The stand-in in vLLM's place, with no engine made yet."""
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    monkeypatch.setattr(vllm_engine, "_ENGINES", [])
    monkeypatch.setattr(fake_vllm, "ENGINES", [])
    return fake_vllm


def run(policy, block=BLOCK, sampling=SAMPLING, noise=NOISE, version=0):
    return list(generate_with_vllm(policy, block, sampling, noise, version, VllmConfig(dtype="float32")))


def change(policy):
    """Changes every weight, so that one that stays behind shows."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(0.5)


def assert_log_probs_are_those_of(policy, groups, temperature=SAMPLING.temperature):
    expected = all_log_probs(policy, Sequences.of(groups), temperature, token_budget=1000)
    row = 0
    for group in groups:
        for found, length in zip(group.log_probs, group.lengths.tolist(), strict=True):
            torch.testing.assert_close(found[:length], expected[row, :length], atol=1e-5, rtol=1e-5)
            assert not found[length:].any()
            row += 1


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])  # tied and untied embeddings
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(engine, architecture):
    policy = language_model(architecture)
    if architecture == "llama":
        with torch.no_grad():  # the model likes the padding token best, which is never drawn
            policy.model.lm_head.weight[policy.spec.pad_id] = policy.model.lm_head.weight[5] * 3
    groups = run(policy)
    assert [group.prompt for group in groups] == list(PROMPTS)
    assert_log_probs_are_those_of(policy, groups)
    ended, lengths = torch.stack([g.ended for g in groups]), torch.stack([g.lengths for g in groups])
    assert ended.any()
    assert not ended.all()
    assert (lengths[~ended] == SAMPLING.max_new_tokens).all()
    for group in groups:
        for row, length, over in zip(group.tokens.tolist(), group.lengths.tolist(), group.ended.tolist(), strict=True):
            assert (row[length - 1] in policy.spec.eos_ids) == over
            assert policy.spec.pad_id not in row[:length]
            assert set(row[length:]) <= {policy.spec.pad_id}


def test_draws_are_keyed_by_seed_iteration_prompt_and_sample(engine):
    policy = language_model("qwen2")
    groups = {group.prompt.id: group for group in run(policy)}
    alone = GenerationBlock((PROMPTS[2], PROMPTS[0]), group_size=4)
    for group in run(policy, alone):
        assert torch.equal(group.tokens, groups[group.prompt.id].tokens)
    assert len({tuple(row) for row in groups[40].tokens.tolist()}) > 1  # samples differ
    for group in run(policy, GenerationBlock(PROMPTS, group_size=2)):
        assert torch.equal(group.lengths, groups[group.prompt.id].lengths[:2])
        assert torch.equal(group.tokens, groups[group.prompt.id].tokens[:2, : group.tokens.shape[1]])
    for other in (Noise(3, 3), Noise(4, 2), Noise(3, 2, "evaluation")):
        assert any(not torch.equal(g.tokens, groups[g.prompt.id].tokens) for g in run(policy, noise=other))


def test_every_step_of_the_engine_is_progress(engine):
    done = []
    with progress_reported_to(lambda: done.append(1)):
        groups = run(language_model("qwen2"), version=0)
    longest = max(int(group.lengths.max()) for group in groups)
    assert longest > 4
    assert len(done) >= longest


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])  # tied and untied embeddings
@pytest.mark.parametrize("kind", ["LLM", "PackedLLM"])
def test_new_weights_reach_the_engine_that_is_kept(engine, monkeypatch, kind, architecture):
    monkeypatch.setattr(engine, "LLM", getattr(engine, kind))
    policy = language_model(architecture)
    for version in range(3):
        assert_log_probs_are_those_of(policy, run(policy, version=version))  # a kept prefix would be of old weights
        run(policy, version=version)
        change(policy)
    assert [made.alive for made in engine.ENGINES] == [True]


def test_an_engine_that_takes_no_weights_is_an_error(engine, monkeypatch):
    monkeypatch.setattr(engine, "LLM", engine.StubbornLLM)
    policy = language_model("qwen2")
    run(policy)
    with pytest.raises(ConfigError, match=r"takes no new weights of qwen2 .*generation.engine=transformers"):
        run(policy, version=1)


def test_weights_that_did_not_arrive_stop_the_run(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "LLM", engine.PackedLLM)
    monkeypatch.setattr(vllm_engine, "process_tied", lambda model: None)
    config = tiny_math(f"run.dir={tmp_path}", *ENGINE, "algorithm.lr=1e-1")
    with pytest.raises(ObjectiveError, match=r"or new weights did not reach it; use generation.vllm.dtype"):
        train_math(config)


def test_a_training_on_the_engine_has_the_newest_weights_in_it_each_time(engine, tmp_path):
    train_math(tiny_math(f"run.dir={tmp_path}", *ENGINE))
    rows = untimed_rows(tmp_path)
    assert len(rows) == 3
    assert all(row["losses/grad_norm"] > 0 and row["losses/mismatch_max"] < 1e-4 for row in rows)
    assert len(engine.ENGINES) == 1


# ------------------------------------------------------------------------------------------------------------ bad input
def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it fails then
    with pytest.raises(ConfigError, match=r"pip install 'rlinf-embodied\[vllm\]'.*engine=transformers"):
        run(language_model("qwen2"))


def test_training_refuses_a_context_that_is_too_short_before_anything_starts(engine, tmp_path):
    config = tiny_math(f"run.dir={tmp_path}", "eval.engine=vllm", "run.exact=false", "generation.vllm.max_model_len=21")
    with pytest.raises(ConfigError, match=r"generation.vllm.max_model_len is 21"):
        train_math(config)
    assert engine.ENGINES == []
