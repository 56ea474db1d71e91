"""Packing keeps to its budget, wastes little, and changes nothing but last bits."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.causal_lm import CausalLM
from rlinf_embodied.config import TinyLMConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.batch import Sequences, all_log_probs, dynamic_batches


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 400))
def test_every_row_is_packed_once_within_the_budget(lengths, budget):
    batches = dynamic_batches(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) * max(lengths[row] for row in rows) <= budget
    # sorted: no sequence of a batch is longer than any of the one before
    for one, other in itertools.pairwise(batches):
        assert min(lengths[row] for row in one) >= max(lengths[row] for row in other)


def test_a_sequence_longer_than_the_budget_is_named():
    with pytest.raises(ConfigError, match=r"tokens_per_microbatch is 40, but sequence 1 has 41"):
        dynamic_batches([3, 41], 40)


def test_log_probs_do_not_depend_on_the_packing():
    policy = CausalLM.tiny(TinyLMConfig(), seed=4)
    g = torch.Generator().manual_seed(0)
    draw = lambda n: tuple(torch.randint(1, 25, (n,), generator=g).tolist())  # noqa: E731
    sequences = Sequences(tuple(draw(n) for n in (3, 9, 1, 6, 4)), tuple(draw(n) for n in (8, 2, 30, 1, 12)))
    one, other = (all_log_probs(policy, sequences, 0.9, token_budget=budget) for budget in (31, 1000))
    assert torch.equal(one != 0, torch.arange(30) < torch.tensor([8, 2, 30, 1, 12])[:, None])
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
