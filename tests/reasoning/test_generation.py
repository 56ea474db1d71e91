"""Generation against a naive loop: the same tokens, exact log-probs, whatever the slots, the block and the decoder."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from language_models import language_model
from transformers import GenerationConfig as GreedyConfig

from policies.causal_lm import CausalLM
from rlinf_embodied.algorithms.log_probs import log_softmax, sample_tokens, truncated
from rlinf_embodied.config import LanguagePolicyConfig, LoraSettings
from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.errors import ConfigError, ObjectiveError
from rlinf_embodied.interfaces.language import TokenBatch, padded
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt, all_log_probs
from rlinf_embodied.reasoning.engine import Generated, generate
from rlinf_embodied.reasoning.generation import ExactEngine

SAMPLING = GenerationConfig(max_new_tokens=14, max_num_seqs=100)
# (decoder it takes, architecture)
ARCHITECTURES = [
    ("LeanDecoder", "qwen2"),
    ("LeanDecoder", "llama"),
    ("CachedDecoder", "qwen3"),
    ("CachedDecoder", "gpt2"),
]


def block_of(lengths: list[int], samples: int = 3, first_id: int = 40) -> GenerationBlock:
    prompts = [
        Prompt(first_id + i, tuple(2 + (7 * i + 3 * j + j * j) % 23 for j in range(length)), sample)
        for i, length in enumerate(lengths)
        for sample in range(samples)
    ]
    return GenerationBlock(prompts=tuple(prompts), sampling=SAMPLING, seed=3, iteration=2)


def sampled(block: GenerationBlock, greedy: bool = False, **changes) -> GenerationBlock:
    return replace(block, sampling=replace(SAMPLING, **changes), greedy=greedy)


BLOCK = block_of([5, 2, 9, 1, 4])


def run(policy, block=BLOCK) -> list[Generated]:
    rows = generate(ExactEngine(policy), block)
    assert [row.row for row in rows] == list(range(len(block.prompts)))
    return rows


@pytest.mark.parametrize("architecture", ["windowed", "bloom"])
def test_a_model_without_keys_and_values_of_every_token_is_refused(architecture):
    with pytest.raises(ConfigError, match=r"policy\.folder has a .*, but its layers do not keep one key"):
        run(language_model(architecture))


@torch.no_grad()
def naive_completion(policy: CausalLM, prompt: Prompt, block: GenerationBlock):
    """One row, no cache: the whole sequence is read anew for each token."""
    tokens, log_probs = list(prompt.tokens), []
    for place in range(block.sampling.max_new_tokens):
        logits = policy.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].clone()
        logits[policy.spec.pad_id] = -torch.inf
        u = torch.from_numpy(np.asarray(uniform(block.seed, "token", block.iteration, prompt.id, prompt.sample, place)))
        token = int(sample_tokens(logits, u, block.sampling.temperature))
        log_probs.append(float((logits.double() / block.sampling.temperature).log_softmax(-1)[token]))
        tokens.append(token)
        if token in policy.spec.eos_ids:
            return tokens[len(prompt.tokens) :], log_probs, True
    return tokens[len(prompt.tokens) :], log_probs, False


def assert_naive(policy, rows: list[Generated], block: GenerationBlock) -> None:
    for row in rows:
        tokens, log_probs, ended = naive_completion(policy, block.prompts[row.row], block)
        assert (row.tokens, row.ended) == (tokens, ended)
        assert row.log_probs == pytest.approx(log_probs, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- the oracle
@pytest.mark.parametrize(("decoder", "architecture"), ARCHITECTURES)
@pytest.mark.parametrize("max_num_seqs", [4, 100])
def test_tokens_and_log_probs_are_those_of_a_naive_loop(monkeypatch, decoder, architecture, max_num_seqs):
    policy, new_empty = language_model(architecture), torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *sizes: new_empty(*sizes).fill_(torch.nan))  # never read
    assert type(policy.decoder(2, 30)).__name__ == decoder
    block = sampled(BLOCK, temperature=0.8, max_num_seqs=max_num_seqs)
    rows = run(policy, block)
    assert len({len(row.tokens) for row in rows}) > 1  # rows end at different steps, so slots are reused
    assert_naive(policy, rows, block)


def test_greedy_tokens_are_those_of_transformers():
    policy = language_model("llama")
    rows = run(policy, sampled(BLOCK, greedy=True, max_new_tokens=20, max_num_seqs=4))
    for row, prompt in zip(rows, BLOCK.prompts, strict=True):
        expected = policy.model.generate(
            torch.tensor([prompt.tokens]),
            generation_config=GreedyConfig(
                max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=0, suppress_tokens=[0]
            ),
        )[0, len(prompt.tokens) :]
        assert row.tokens == expected.tolist()


# ----------------------------------------------------------------------------------------------------------------- ends
def test_rows_end_at_any_end_token_and_otherwise_by_length():
    policy = language_model("qwen2")
    policy.model.generation_config.eos_token_id = [1, 7, 8, 9]
    policy = CausalLM(policy.model, policy.codec)
    assert policy.spec.eos_ids == (1, 7, 8, 9)
    for row in run(policy):
        *before, last = row.tokens
        assert row.ended == (last in policy.spec.eos_ids)
        assert row.ended or len(row.tokens) == 14
        assert not set(before) & set(policy.spec.eos_ids)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(greedy):
    policy = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    free = [(row.tokens, row.ended) for row in run(policy, sampled(BLOCK, greedy=greedy))]
    texts = [policy.codec.decode(tokens) for tokens, _ in free]  # a token is a character
    stop = [max(texts, key=len)[3:6], max(texts, key=len)[8]]
    found = [(row.tokens, row.ended) for row in run(policy, sampled(BLOCK, greedy=greedy, stop=stop))]
    for (whole, ended), text, (tokens, stopped_early) in zip(free, texts, found, strict=True):
        ends = [text.find(part) + len(part) for part in stop if part in text]
        assert tokens == whole[: min(ends, default=len(whole))]
        assert stopped_early == (bool(ends) or ended)
    assert any(len(tokens) < len(whole) for (tokens, _), (whole, _) in zip(found, free, strict=True))


def test_special_tokens_within_a_stop_string_do_not_hide_it():
    policy = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    policy.codec.tokenizer.add_special_tokens({"additional_special_tokens": list("0123456789+-*/:?")})
    free = [row.tokens for row in run(policy, sampled(BLOCK, max_new_tokens=60))]
    printed = [[place for place, token in enumerate(row) if policy.codec.decode([token])] for row in free]
    gap, stop = max(
        (b - a, policy.codec.decode(row[a : b + 1]))
        for row, places in zip(free, printed, strict=True)
        for a, b in pairwise(places)
    )
    assert gap > 8  # special tokens between the two characters of the stop string
    stopped = run(policy, sampled(BLOCK, max_new_tokens=60, stop=[stop]))
    for row, whole in zip(stopped, free, strict=True):
        prefixes = [whole[:length] for length in range(1, len(whole) + 1)]
        assert row.tokens == next((p for p in prefixes if stop in policy.codec.decode(p)), whole)


# -------------------------------------------------------------------------------------------------- against training
def batch_of(rows: list[Generated], block: GenerationBlock = BLOCK) -> TokenBatch:
    supports = [row.support_sizes for row in rows], [row.support_ids for row in rows]
    return TokenBatch.of([p.tokens for p in block.prompts], [row.tokens for row in rows], None, *supports)


def recorded_and_trained(policy, length: int, temperature: float = 1.0, **restrictions) -> tuple[torch.Tensor, ...]:
    rows = run(policy, sampled(BLOCK, max_new_tokens=length, temperature=temperature, **restrictions, max_num_seqs=6))
    trained = all_log_probs(policy, batch_of(rows), temperature, token_budget=100)
    return padded([row.log_probs for row in rows], torch.float32), trained


RESTRICTIONS = [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.9}, {"top_k": 9, "top_p": 0.9, "min_p": 0.9}]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("restrictions", [{}, *RESTRICTIONS], ids="+".join)
def test_recorded_log_probs_are_those_of_training_at_the_same_weights(temperature, restrictions):
    policy = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    recorded, trained = recorded_and_trained(policy, 30, temperature, **restrictions)
    assert trained.abs().max() > 1
    assert (recorded - trained).abs().max() <= 1e-5


@pytest.mark.parametrize("restrictions", RESTRICTIONS, ids="+".join)
def test_the_tokens_that_could_have_been_sampled_are_recorded(restrictions):
    policy = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    block = sampled(BLOCK, max_num_seqs=6, **restrictions)
    limits = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | restrictions
    for row, prompt in zip(run(policy, block), block.prompts, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([[*prompt.tokens, *row.tokens[:-1]]])).logits[0].clone()
        logits[:, policy.spec.pad_id] = -torch.inf
        left = truncated(log_softmax(logits[len(prompt.tokens) - 1 :], 1.0), **limits).isfinite()
        assert row.support_sizes == left.sum(1).tolist()
        assert row.support_ids.tolist() == left.nonzero()[:, 1].tolist()
        assert max(row.support_sizes) < 24  # of 25 tokens, one of which is never sampled
        assert left.gather(1, torch.tensor(row.tokens)[:, None]).all()


@pytest.mark.parametrize(
    "block", [BLOCK, sampled(BLOCK, top_k=5, greedy=True), replace(sampled(BLOCK, top_k=5), records_support=False)]
)
def test_sampling_without_restriction_greedy_choices_and_evaluation_record_no_alternatives(block):
    rows = run(CausalLM.from_config(LanguagePolicyConfig(), None, 1), block)
    assert not any(row.support_sizes or row.support_ids for row in rows)
    assert batch_of(rows).support is None


def test_generation_sees_new_weights_and_adapters():
    pytest.importorskip("peft", reason="needs the extra lora")
    plain = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    policy = CausalLM(plain.model, plain.codec, LanguagePolicyConfig(lora=LoraSettings(rank=4, alpha=8.0)), seed=1)
    before = run(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    after = run(policy)
    assert any(a.tokens != b.tokens for a, b in zip(before, after, strict=True))
    recorded, trained = recorded_and_trained(policy, 20)
    assert (recorded - trained).abs().max() <= 1e-5


# ------------------------------------------------------------------------------------------------------------ bad input
def test_weights_that_are_not_finite_are_reported():
    policy = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ObjectiveError, match="NaN"):
        run(policy)
