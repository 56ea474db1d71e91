"""OpenVLA's decoding: a cache changes nothing, log-probs are exact, rows are apart, tokens mean actions."""

import numpy as np
import openvla_folders as toys
import pytest
import torch

from policies.openvla.actions import ActionTokens, range_of
from policies.openvla.decoding import TokenDistribution, action_log_probs, decode, predicting_states
from policies.openvla.prompt import rows_of
from rlinf_embodied.errors import ConfigError

NUM_TOKENS = 4
ACTIONS = slice(31744, 32000)


@pytest.fixture(scope="module")
def network():
    torch.set_num_threads(1)
    return toys.network()


def uniforms(rows: int = 3) -> torch.Tensor:
    return torch.rand(rows, NUM_TOKENS, generator=torch.Generator().manual_seed(2))


def score(network, rows, pixels, tokens, distribution):
    hidden = predicting_states(network, rows, pixels, tokens)
    return action_log_probs(hidden, network.output_layer, tokens, distribution)


def test_decoding_with_a_cache_equals_the_forward_without_one(network):
    done = decode(network, toys.rows(), toys.pixels(3), NUM_TOKENS, TokenDistribution(), uniforms())
    with torch.no_grad():
        whole = network.output_layer(predicting_states(network, toys.rows(), toys.pixels(3), done.tokens))
        cached = network.output_layer(done.hidden)
    assert (whole - cached).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("columns", [None, ACTIONS])
def test_log_probs_of_decoding_are_those_of_scoring(network, columns):
    distribution = TokenDistribution(temperature=1.6, columns=columns)
    done = decode(network, toys.rows(), toys.pixels(3), NUM_TOKENS, distribution, uniforms())
    scored, entropy = score(network, toys.rows(), toys.pixels(3), done.tokens, distribution)
    torch.testing.assert_close(scored, done.log_probs, atol=1e-5, rtol=0)
    assert scored.requires_grad
    assert bool((entropy > 0).all())
    if columns is not None:
        assert bool(((done.tokens >= columns.start) & (done.tokens < columns.stop)).all())


def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(network):
    distribution = TokenDistribution()
    together = decode(network, toys.rows(), toys.pixels(3), NUM_TOKENS, distribution, uniforms())
    for row in range(3):
        images, draws = toys.pixels(3)[row : row + 1], uniforms()[row : row + 1]
        alone = decode(network, toys.one_row(row), images, NUM_TOKENS, distribution, draws)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.hidden[0], together.hidden[row], atol=1e-4, rtol=0)


def test_the_image_and_the_instruction_decide(network):
    def states(rows, images):
        with torch.no_grad():
            return predicting_states(network, rows, images, torch.full((1, 2), 31800))

    base = states(toys.one_row(0), toys.pixels(1))
    assert (states(toys.one_row(1), toys.pixels(1)) - base).abs().max() > 0.1
    assert (states(toys.one_row(0), toys.pixels(1, seed=9)) - base).abs().max() > 0.01


@pytest.mark.parametrize(
    "distribution",
    [
        TokenDistribution(),
        TokenDistribution(temperature=0.7, columns=slice(30, 50)),
        TokenDistribution(temperature=1.6, columns=slice(10, 60), top_k=45),
    ],
)
def test_log_probs_in_pieces_equal_naive_ones_with_their_gradients(distribution):
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(8, 60, bias=False)
    states = torch.randn(2, 5, 8, generator=generator)
    with torch.no_grad():
        allowed = distribution.allowed(layer(states)).isfinite()
    tokens = torch.multinomial(allowed.flatten(0, 1).float(), 1, generator=generator).view(2, 5)

    def naive(hidden):
        masked = layer(hidden).masked_fill(~allowed, -1e9) / distribution.temperature
        log_probs = masked.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, tokens[..., None])[..., 0], entropy

    def with_gradients(function):
        hidden = states.clone().requires_grad_()
        log_probs, entropy = function(hidden)
        gradients = torch.autograd.grad((log_probs + 0.3 * entropy).sum(), [hidden, layer.weight])
        return (log_probs, entropy, *gradients)

    pieces = with_gradients(lambda hidden: action_log_probs(hidden, layer, tokens, distribution, positions_at_once=3))
    for mine, theirs in zip(pieces, with_gradients(naive), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_tokens_are_chosen_among_those_that_can_be_drawn_as_from_all_logits():
    generator = torch.Generator().manual_seed(0)
    layer, states = torch.nn.Linear(8, 60, bias=False), torch.randn(200, 8, generator=generator)
    uniforms = torch.rand(200, generator=generator)
    for distribution in (TokenDistribution(), TokenDistribution(columns=slice(30, 50)), TokenDistribution(top_k=4)):
        every = distribution.allowed(layer(states))
        assert torch.equal(distribution.choose(states, layer, None), every.argmax(-1))
        cumulated = every.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulated, uniforms.double()[:, None], right=True)[:, 0]
        assert torch.equal(distribution.choose(states, layer, uniforms), drawn)


def test_a_token_that_cannot_be_drawn_has_no_probability(network):
    tokens = torch.tensor([[31743, 31744]])
    distribution = TokenDistribution(columns=ACTIONS)
    log_probs, _ = score(network, toys.one_row(0), toys.pixels(1), tokens, distribution)
    assert log_probs[0, 0] == -torch.inf
    assert log_probs[0, 1] > -torch.inf


def test_the_256_bins_are_the_last_ids_and_the_lowest_value_is_the_highest_id():
    tokens = ActionTokens(32000, 256)
    assert tokens.encode([-1.0, -2.0, 1.0, 2.0]).tolist() == [31999, 31999, 31744, 31744]
    assert tokens.encode(0.0) == 32000 - 128
    values = np.linspace(-1, 1, 1000)
    assert np.abs(tokens.decode(tokens.encode(values)) - values).max() <= 1 / 255 + 1e-12
    assert tokens.decode(31744) == tokens.decode(31745) == tokens.decode(5) == tokens.centers[-1]
    assert tokens.decode(40000) == tokens.centers[0]


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
    [([5, 6], "token 5, but it must begin with BOS"), ([1] * 9, "has 10 tokens, but rows have 5")],
)
def test_a_prompt_that_makes_no_row_is_refused(prompt, message):
    with pytest.raises(ConfigError, match=message):
        rows_of([prompt], pad_token_id=32000, width=5)
