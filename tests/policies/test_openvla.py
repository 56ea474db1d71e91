"""OpenVLA's decoding: a cache changes nothing, log-probs are exact, rows are apart, tokens mean actions."""

import numpy as np
import openvla_folders as toys
import pytest
import torch

from policies.openvla.actions import ActionTokens, range_of
from policies.openvla.decoding import TokenDistribution, decode, predicting_states
from policies.openvla.prompt import rows_of
from rlinf_embodied.errors import ConfigError

NUM_TOKENS = 4
ACTIONS = slice(31744, 32000)


@pytest.fixture(scope="module")
def network():
    return toys.network()


def uniforms(rows: int = 3) -> torch.Tensor:
    return torch.rand(rows, NUM_TOKENS, generator=torch.Generator().manual_seed(2))


def test_decoding_with_a_cache_equals_the_forward_without_one_and_its_tokens_can_be_drawn(network):
    distribution = TokenDistribution(ACTIONS, temperature=1.6)
    tokens, states = decode(network, toys.rows(), toys.pixels(3), NUM_TOKENS, distribution, uniforms())
    whole = predicting_states(network, toys.rows(), toys.pixels(3), tokens)
    torch.testing.assert_close(whole, states, atol=1e-5, rtol=1e-4)
    scored, entropy = distribution.score(whole, network.output_layer, tokens)
    torch.testing.assert_close(scored, distribution.score(states, network.output_layer, tokens)[0], atol=1e-5, rtol=0)
    assert scored.requires_grad
    assert bool((entropy > 0).all())
    assert bool(((tokens >= ACTIONS.start) & (tokens < ACTIONS.stop)).all())


def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(network):
    distribution = TokenDistribution(ACTIONS)
    tokens, states = decode(network, toys.rows(), toys.pixels(3), NUM_TOKENS, distribution, uniforms())
    for row in range(3):
        images, draws = toys.pixels(3)[row : row + 1], uniforms()[row : row + 1]
        alone, state = decode(network, toys.one_row(row), images, NUM_TOKENS, distribution, draws)
        assert torch.equal(alone[0], tokens[row])
        torch.testing.assert_close(state[0], states[row], atol=1e-4, rtol=0)


def test_the_image_and_the_instruction_decide(network):
    def states(rows, images):
        with torch.no_grad():
            return predicting_states(network, rows, images, torch.full((1, 2), 31800))

    base = states(toys.one_row(0), toys.pixels(1))
    assert (states(toys.one_row(1), toys.pixels(1)) - base).abs().max() > 0.1
    assert (states(toys.one_row(0), toys.pixels(1, seed=9)) - base).abs().max() > 0.01


def test_tokens_are_chosen_and_scored_as_among_all_logits_of_which_only_some_count():
    generator = torch.Generator().manual_seed(0)
    layer, states = torch.nn.Linear(8, 60, bias=False), torch.randn(200, 8, generator=generator)
    uniforms, distribution = torch.rand(200, generator=generator), TokenDistribution(slice(30, 50), temperature=1.6)
    outside = torch.ones(60, dtype=torch.bool)
    outside[30:50] = False
    every = (layer(states).double() / 1.6).masked_fill(outside, -torch.inf).softmax(-1)
    tokens = distribution.choose(states, layer, uniforms)
    assert torch.equal(distribution.choose(states, layer, None), every.argmax(-1))
    assert torch.equal(tokens, torch.searchsorted(every.cumsum(-1), uniforms.double()[:, None], right=True)[:, 0])
    log_probs, entropy = distribution.score(states, layer, tokens)
    torch.testing.assert_close(log_probs.double(), every.gather(-1, tokens[:, None])[:, 0].log(), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -every.xlogy(every).sum(-1), atol=1e-5, rtol=0)


def test_the_256_bins_are_the_last_ids_and_the_lowest_value_is_the_highest_id():
    tokens = ActionTokens(32000, 256)
    assert tokens.encode([-1.0, -2.0, 1.0, 2.0]).tolist() == [31999, 31999, 31744, 31744]
    assert tokens.encode(0.0) == 32000 - 128
    values = np.linspace(-1, 1, 1000)
    assert np.abs(tokens.decode(tokens.encode(values)) - values).max() <= 1 / 255 + 1e-12
    assert tokens.decode(31744) == tokens.decode(31745) == tokens.decode(5) == pytest.approx(1 - 1 / 255)
    assert tokens.decode(40000) == tokens.decode(31999) == pytest.approx(-1 + 1 / 255)


def test_actions_are_scaled_where_the_mask_says_so():
    found = range_of({"arm": toys.statistics(action=3)}, "arm")
    assert found.expand(np.array([[-1.0, 1.0, 0.25], [0.0, 0.0, 0.0]])).tolist() == [[-1.0, 3.0, 0.25], [0.5, 0.5, 0.0]]
    assert np.allclose(found.normalise(np.array([2.0, -9.0, 5.0])), [1.0, -1.0, 1.0])


def test_prompts_end_together_in_the_empty_token():
    rows = rows_of([[1, 7, 8], [1, 9, 29871]], pad_token_id=32000, width=5)
    assert rows.ids.tolist() == [[1, 32000, 7, 8, 29871], [1, 32000, 32000, 9, 29871]]
    assert rows.present.tolist() == [[True, False, True, True, True], [True, False, False, True, True]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([5, 6], "token 5, but it must begin with BOS"), ([1] * 9, "prompt_length is 5, but a prompt has 10 tokens")],
)
def test_a_prompt_that_makes_no_row_is_refused(prompt, message):
    with pytest.raises(ConfigError, match=message):
        rows_of([prompt], pad_token_id=32000, width=5)
