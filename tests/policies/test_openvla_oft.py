"""OpenVLA-OFT: a chunk at once, all positions seeing all, exact log-probs, L1 for evaluation only, FiLM, images."""

import openvla_folders as toys
import pytest
import torch

from policies.openvla.decoding import TokenDistribution, action_log_probs
from policies.openvla.prompt import TokenRows
from policies.openvla.vision import add_film

NUM_SLOTS = toys.CHUNK_LEN * toys.ACTION_DIM
DISTRIBUTION = TokenDistribution(temperature=1.6, columns=slice(31744, 32000))


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return toys.oft()


def test_log_probs_of_decoding_are_those_of_scoring(model):
    uniforms = torch.rand(3, NUM_SLOTS, generator=torch.Generator().manual_seed(2))
    done = model.decode(toys.rows(), toys.pixels(3), DISTRIBUTION, uniforms)
    hidden = model.hidden(toys.rows(), toys.pixels(3))
    scored, _ = action_log_probs(hidden, model.network.output_layer, done.tokens, DISTRIBUTION)
    assert done.tokens.shape == (3, NUM_SLOTS)
    torch.testing.assert_close(scored, done.log_probs, atol=1e-6, rtol=0)
    assert scored.requires_grad


def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(model):
    with torch.no_grad():
        together = model.hidden(toys.rows(), toys.pixels(3))
        alone = [model.hidden(toys.one_row(row), toys.pixels(3)[row : row + 1])[0] for row in range(3)]
    torch.testing.assert_close(torch.stack(alone), together, atol=1e-4, rtol=0)


def test_every_position_sees_what_comes_after_it(model):
    """The stop token stands last: under a causal mask it could not change an action's state."""
    with torch.no_grad():
        ended = model.hidden(toys.rows(), toys.pixels(3))
        open_ended = model.hidden(toys.rows(), toys.pixels(3), stop_token=False)
    assert ((ended - open_ended).abs().amax(-1) > 1e-3).all()


def test_the_first_action_is_read_at_the_empty_token(model):
    with torch.no_grad():
        sequence = model.sequence(toys.rows(), toys.pixels(3))
        mask = sequence.present[:, None, None, :].expand(-1, 1, sequence.present.shape[1], -1)
        states = model.network.hidden(sequence.embeddings, sequence.positions, mask)
        hidden = model.hidden(toys.rows(), toys.pixels(3))
    place = 4 + toys.rows().ids.shape[1] - 1  # 4 patches of 14 pixels in 28 x 28
    assert torch.equal(sequence.embeddings[:, place], model.network.embed(torch.full((3,), 29871)))
    assert torch.equal(hidden, states[:, place : place + NUM_SLOTS])


def test_both_images_and_the_proprioception_count():
    both = toys.oft(proprio=True)
    images, state = toys.pixels(3, images=2), torch.zeros(3, toys.PROPRIO_DIM)

    def states(images, state):
        with torch.no_grad():
            return both.hidden(toys.rows(), images, state)

    base = states(images, state)
    assert (states(images, state + 0.5) - base).abs().max() > 1e-3
    for first in (0, 6):
        changed = images.clone()
        changed[:, first : first + 6] += 1.0
        assert (states(changed, state) - base).abs().max() > 1e-3


def test_film_without_effect_is_the_plain_tower_and_otherwise_the_instruction_changes_what_is_seen():
    network, images = toys.network(), toys.pixels(2)
    with torch.no_grad():
        plain = network.vision_backbone(images)
        add_film(network.vision_backbone, network.dim, toys.RANK)
        for name, parameter in network.vision_backbone.named_parameters():
            if ".scale." in name or ".shift." in name:
                parameter.zero_()
        language = torch.randn(2, network.dim)
        assert torch.equal(network.vision_backbone(images, language), plain)
        toys.randomised(network.vision_backbone, 3)
        first, second = (network.vision_backbone(images, words) for words in (language, language + 1.0))
    assert (first - second).abs().max() > 1e-2


def test_film_reads_the_words_and_not_the_padding():
    filmed = toys.oft(film=True)
    rows = toys.rows()
    with torch.no_grad():
        other = TokenRows(torch.where(rows.present, rows.ids, 77), rows.present)
        assert torch.equal(filmed.language(other), filmed.language(rows))
        stop = filmed.network.embed(torch.tensor([2]))
        words = torch.cat([filmed.network.embed(rows.ids[1]), stop])  # the longest row has no padding
        torch.testing.assert_close(filmed.language(rows)[1], words.mean(0))
        assert filmed.hidden(rows, toys.pixels(3)).isfinite().all()
