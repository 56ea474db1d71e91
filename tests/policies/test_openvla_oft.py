"""OpenVLA-OFT: a chunk at once, all positions seeing all; images and proprioception."""

import openvla_folders as toys
import pytest
import torch

NUM_SLOTS = toys.CHUNK_LEN * toys.ACTION_DIM


@pytest.fixture(scope="module")
def model():
    return toys.oft()


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
