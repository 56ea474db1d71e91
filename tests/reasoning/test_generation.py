"""Generation against a naive loop: the same tokens, exact log-probs, whatever the slots, the block and the decoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from language_models import language_model
from transformers import GenerationConfig as GreedyConfig

from policies.causal_lm import CausalLM
from policies.lean_decoding import LeanDecoder
from rlinf_embodied.algorithms.log_probs import sample_tokens
from rlinf_embodied.config import LoraSettings, TinyLMConfig
from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.errors import ConfigError, ObjectiveError
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import GenerationBlock, Group, Prompt, Sequences, all_log_probs
from rlinf_embodied.reasoning.engine import generate
from rlinf_embodied.reasoning.generation import ExactEngine

SAMPLING = GenerationConfig(max_new_tokens=14, max_num_seqs=100)
# (decoder it takes, architecture)
ARCHITECTURES = [
    ("LeanDecoder", "qwen2"),
    ("LeanDecoder", "llama"),
    ("CachedDecoder", "qwen3"),
    ("CachedDecoder", "gpt2"),
]


def block_of(lengths: list[int], group_size: int = 3, first_id: int = 40) -> GenerationBlock:
    prompts = [
        Prompt(first_id + i, tuple(2 + (7 * i + 3 * j + j * j) % 23 for j in range(length)))
        for i, length in enumerate(lengths)
    ]
    return GenerationBlock(prompts=tuple(prompts), group_size=group_size, sampling=SAMPLING, seed=3, iteration=2)


def sampled(block: GenerationBlock, greedy: bool = False, **changes) -> GenerationBlock:
    return replace(block, sampling=replace(SAMPLING, **changes), greedy=greedy)


BLOCK = block_of([5, 2, 9, 1, 4])


def run(policy, block=BLOCK):
    groups = list(generate(ExactEngine(policy), block))
    assert sorted(group.prompt.id for group in groups) == sorted(prompt.id for prompt in block.prompts)
    return {group.prompt.id: group for group in groups}


@pytest.mark.parametrize("architecture", ["windowed", "bloom"])
def test_a_model_without_keys_and_values_of_every_token_is_refused(architecture):
    with pytest.raises(ConfigError, match=r"policy\.folder has a .*, but its layers do not keep one key"):
        run(language_model(architecture))


@torch.no_grad()
def naive_completion(policy: CausalLM, prompt: Prompt, sample: int, block: GenerationBlock):
    """One row, no cache: the whole sequence is read anew for each token."""
    tokens, log_probs = list(prompt.tokens), []
    for place in range(block.sampling.max_new_tokens):
        logits = policy.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].clone()
        logits[policy.spec.pad_id] = -torch.inf
        u = torch.from_numpy(np.asarray(uniform(block.seed, "token", block.iteration, prompt.id, sample, place)))
        token = int(sample_tokens(logits, u, block.sampling.temperature))
        log_probs.append(float((logits.double() / block.sampling.temperature).log_softmax(-1)[token]))
        tokens.append(token)
        if token in policy.spec.eos_ids:
            return tokens[len(prompt.tokens) :], log_probs, True
    return tokens[len(prompt.tokens) :], log_probs, False


def assert_naive(policy, groups: dict[int, Group], block: GenerationBlock) -> None:
    for group in groups.values():
        for sample in range(len(group.lengths)):
            tokens, log_probs, ended = naive_completion(policy, group.prompt, sample, block)
            length = int(group.lengths[sample])
            assert group.tokens[sample, :length].tolist() == tokens
            assert bool(group.ended[sample]) == ended
            torch.testing.assert_close(group.log_probs[sample, :length], torch.tensor(log_probs), atol=1e-5, rtol=0)
            assert not group.log_probs[sample, length:].any()
            assert (group.tokens[sample, length:] == policy.spec.pad_id).all()


# ---------------------------------------------------------------------------------------------------------- the oracle
@pytest.mark.parametrize(("decoder", "architecture"), ARCHITECTURES)
@pytest.mark.parametrize("max_num_seqs", [4, 100])
def test_tokens_and_log_probs_are_those_of_a_naive_loop(decoder, architecture, max_num_seqs):
    policy = language_model(architecture)
    assert type(policy.decoder(2, 30)).__name__ == decoder
    block = sampled(BLOCK, temperature=0.8, max_num_seqs=max_num_seqs)
    groups = run(policy, block)
    lengths = torch.cat([group.lengths for group in groups.values()])
    assert lengths.min() < lengths.max()  # rows end at different steps, so slots are reused
    assert_naive(policy, groups, block)


def test_greedy_tokens_are_those_of_transformers():
    policy = language_model("llama")
    groups = run(policy, sampled(BLOCK, greedy=True, max_new_tokens=20, max_num_seqs=4))
    for group in groups.values():
        expected = policy.model.generate(
            torch.tensor([group.prompt.tokens]),
            generation_config=GreedyConfig(
                max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=0, suppress_tokens=[0]
            ),
        )[0, len(group.prompt.tokens) :]
        for sample in range(3):
            assert group.tokens[sample, : group.lengths[sample]].tolist() == expected.tolist()


# ------------------------------------------------------------------------------------------------------------- streams
def test_groups_come_in_order_while_others_still_decode(monkeypatch):
    steps, step = [], LeanDecoder.step
    monkeypatch.setattr(LeanDecoder, "step", lambda self, tokens: steps.append(1) or step(self, tokens))
    policy = CausalLM.tiny(TinyLMConfig(), seed=1)
    block = sampled(block_of([3] * 12, group_size=2), max_new_tokens=20, max_num_seqs=8)
    seen = [(group.prompt.id, len(steps)) for group in generate(ExactEngine(policy), block)]
    assert seen[0][1] < len(steps) / 2
    assert [prompt for prompt, _ in seen] == [prompt.id for prompt in block.prompts]


def test_rows_end_at_any_end_token_and_otherwise_by_length():
    policy = language_model("qwen2")
    policy.model.generation_config.eos_token_id = [1, 7, 8, 9]
    policy = CausalLM(policy.model, policy.tokenizer)
    assert policy.spec.eos_ids == (1, 7, 8, 9)
    groups = run(policy)
    for group in groups.values():
        last = group.tokens.gather(1, group.lengths[:, None] - 1)[:, 0]
        assert torch.equal(group.ended, torch.isin(last, torch.tensor(policy.spec.eos_ids)))
        assert (group.lengths[~group.ended] == 14).all()
        before = torch.arange(group.tokens.shape[1]) < group.lengths[:, None] - 1
        assert not torch.isin(group.tokens[before], torch.tensor(policy.spec.eos_ids)).any()


@pytest.mark.parametrize("greedy", [False, True])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(greedy):
    policy = CausalLM.tiny(TinyLMConfig(), seed=1)
    free = [row for group in run(policy, sampled(BLOCK, greedy=greedy)).values() for row in rows_of(group)]
    texts = [policy.decode(tokens) for tokens, _ in free]  # a token is a character
    stop = [max(texts, key=len)[3:6], max(texts, key=len)[8]]
    stopped = run(policy, sampled(BLOCK, greedy=greedy, stop=stop))
    found = [row for group in stopped.values() for row in rows_of(group)]
    for (whole, ended), text, (tokens, stopped_early) in zip(free, texts, found, strict=True):
        ends = [text.find(part) + len(part) for part in stop if part in text]
        assert tokens == whole[: min(ends, default=len(whole))]
        assert stopped_early == (bool(ends) or ended)
    assert any(len(tokens) < len(whole) for (tokens, _), (whole, _) in zip(found, free, strict=True))


def rows_of(group: Group) -> list[tuple[list[int], bool]]:
    lengths = group.lengths.tolist()
    return [(group.tokens[k, :n].tolist(), bool(group.ended[k])) for k, n in enumerate(lengths)]


# -------------------------------------------------------------------------------------------------- against training
def recorded_and_trained(
    policy, length: int, temperature: float = 1.0, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    changes = {"max_new_tokens": length, "temperature": temperature, "top_k": top_k}
    groups = run(policy, sampled(BLOCK, **changes, max_num_seqs=6)).values()
    rows = [(group, sample) for group in groups for sample in range(len(group.lengths))]
    trained = all_log_probs(policy, Sequences.of(list(groups)), temperature, token_budget=100)
    recorded = torch.zeros_like(trained)
    for number, (group, sample) in enumerate(rows):
        whole = group.log_probs[sample]
        recorded[number, : len(whole)] = whole
    return recorded, trained


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 0), (1.0, 0), (1.0, 2)])
def test_recorded_log_probs_are_those_of_training_at_the_same_weights(temperature, top_k):
    policy = CausalLM.tiny(TinyLMConfig(), seed=1)
    recorded, trained = recorded_and_trained(policy, 30, temperature, top_k)
    assert trained.abs().max() > 1
    assert (recorded - trained).abs().max() <= 1e-5


def test_generation_sees_new_weights_and_adapters():
    pytest.importorskip("peft", reason="needs the extra lora")
    plain = CausalLM.tiny(TinyLMConfig(), seed=1)
    policy = CausalLM(plain.model, plain.tokenizer, lora=LoraSettings(rank=4, alpha=8.0), seed=1)
    before = run(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    after = run(policy)
    assert any(not torch.equal(before[i].tokens, after[i].tokens) for i in before)
    recorded, trained = recorded_and_trained(policy, 20)
    assert (recorded - trained).abs().max() <= 1e-5


# ------------------------------------------------------------------------------------------------------------ bad input
def test_weights_that_are_not_finite_are_reported():
    policy = CausalLM.tiny(TinyLMConfig(), seed=1)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ObjectiveError, match="NaN"):
        run(policy)
