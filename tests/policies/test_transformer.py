"""The transformer of the small policies, bit for bit transformers.LlamaModel."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from policies.transformer import Transformer


@pytest.mark.parametrize(("dim", "layers", "heads"), [(32, 1, 2), (64, 3, 4)])
def test_weights_values_and_gradients_are_those_of_llama(dim: int, layers: int, heads: int) -> None:
    config = LlamaConfig(
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=16,
        use_cache=False,
    )
    models, after = [], []
    for make in (lambda: LlamaModel(config), lambda: Transformer(dim, layers, heads)):
        torch.manual_seed(3)
        models.append(make())
        after.append(torch.rand(1))  # the next draw of what is built behind it
    theirs, ours = models
    assert after[0] == after[1]
    theirs.set_input_embeddings(torch.nn.Identity())
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    sequence = torch.randn(5, 11, dim)
    expected, found = theirs(inputs_embeds=sequence).last_hidden_state, ours(sequence)
    assert torch.equal(expected, found)
    expected.square().sum().backward()
    found.square().sum().backward()
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert torch.equal(a.grad, b.grad), name
