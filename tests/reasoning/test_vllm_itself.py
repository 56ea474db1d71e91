"""The vLLM engine with vLLM itself, on whatever device it was built for; an engine takes half a minute to start."""

from __future__ import annotations

import pytest
import torch

from policies.causal_lm import CausalLM
from rlinf_embodied.config import TinyLMConfig, VllmConfig
from rlinf_embodied.reasoning import vllm_engine
from rlinf_embodied.reasoning.batch import GenerationBlock, Noise, Prompt, SamplingParams, Sequences, all_log_probs

pytest.importorskip("vllm", reason="needs vLLM in an environment of its own: docs/reasoning.md")

BLOCK = GenerationBlock((Prompt(40, (5, 9, 2)), Prompt(7, (3, 4, 8, 8, 12)), Prompt(23, (6,))), group_size=4)


@pytest.fixture
def policy():
    """A model with tied embeddings and heads of a size that vLLM has kernels for."""
    made = CausalLM.tiny(TinyLMConfig(hidden_size=64, num_heads=2, num_layers=2, context_length=64), seed=1)
    drawn = torch.Generator().manual_seed(0)
    for parameter in made.module.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2, generator=drawn)
    yield made
    vllm_engine.close_engine()


def largest_difference(policy, temperature, version):
    settings = VllmConfig(dtype="float32", enforce_eager=True, max_model_len=64)
    sampling = SamplingParams(max_new_tokens=20, temperature=temperature)
    groups = list(vllm_engine.generate_with_vllm(policy, BLOCK, sampling, Noise(3, 0), version, settings))
    assert [len(group.lengths) for group in groups] == [4, 4, 4]
    rows = Sequences.of(groups)
    expected = all_log_probs(policy, rows, temperature or 1.0, token_budget=1000)
    found = torch.cat([torch.nn.functional.pad(g.log_probs, (0, 20 - g.log_probs.shape[1])) for g in groups])
    return float((found[:, : expected.shape[1]] - expected).abs().max())


@pytest.mark.timeout(1800)
def test_log_probs_are_those_of_training_with_each_version_of_the_weights(policy):
    for version in range(3):
        assert largest_difference(policy, 0.7, version) < 1e-4
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.mul_(0.9)
    assert largest_difference(policy, 0.0, 3) < 1e-4
