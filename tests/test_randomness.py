"""Keyed draws are a function of their key alone, and of the right shape and range."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_embodied.config import EvalConfig
from rlinf_embodied.randomness import normal, permutation, reset_seed, uniform, words

seeds = st.integers(0, 2**31 - 1)
ids = st.lists(st.integers(0, 2**40), min_size=1, max_size=20)
few = st.lists(st.integers(0, 1000), min_size=1, max_size=5)
FEW = settings(max_examples=30, deadline=None)


@FEW
@given(seeds, ids, st.integers(0, 1000), st.data())
def test_a_draw_does_not_depend_on_how_rows_are_split(seed, rows, step, data):
    cut = data.draw(st.integers(0, len(rows)))
    whole = uniform(seed, "action", rows, step, shape=(2, 3))
    parts = [
        uniform(seed, "action", np.array(part, dtype=np.int64), step, shape=(2, 3)) for part in (rows[:cut], rows[cut:])
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    np.testing.assert_array_equal(whole[-1], uniform(seed, "action", rows[-1], step, shape=(2, 3)))


@FEW
@given(seeds, few, few)
def test_ids_broadcast_to_the_same_words_as_one_by_one(seed, rows, steps):
    table = words(seed, "x", np.array(rows)[:, None], np.array(steps))
    assert table.shape == (len(rows), len(steps))
    assert table.tolist() == [[int(words(seed, "x", row, step)) for step in steps] for row in rows]


@FEW
@given(seeds, ids)
def test_uniforms_lie_strictly_between_0_and_1(seed, rows):
    drawn = uniform(seed, "noise", rows, shape=(64,))
    assert drawn.dtype == np.float32
    assert drawn.shape == (len(rows), 64)
    assert drawn.min() > 0.0
    assert drawn.max() < 1.0


def test_uniforms_and_normals_have_the_moments_of_their_laws():
    row = np.arange(200_000)
    flat, bell = uniform(7, "u", row), normal(7, "n", row)
    # standard errors at 200,000 draws: 0.0006 of the uniform mean, 0.0022 of the normal mean, 0.0016 of its deviation
    assert abs(flat.mean() - 0.5) < 0.003
    assert abs(flat.var() - 1 / 12) < 0.001
    assert abs(bell.mean()) < 0.01
    assert abs(bell.std() - 1.0) < 0.01
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < 0.01


@FEW
@given(seeds, st.integers(0, 100), st.integers(0, 300))
def test_a_permutation_is_one(seed, epoch, size):
    order = permutation(seed, "shuffle", epoch, size=size)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == permutation(seed, "shuffle", epoch, size=size).tolist()


def test_permutations_of_other_epochs_differ():
    orders = {tuple(permutation(0, "shuffle", epoch, size=50).tolist()) for epoch in range(20)}
    assert len(orders) == 20


@FEW
@given(seeds, ids)
def test_training_seeds_are_never_evaluation_seeds(seed, rows):
    drawn = reset_seed(seed, rows)
    assert drawn.min() >= 2**30
    assert drawn.max() < 2**31
    largest = EvalConfig(seed=2**30 - 101, num_episodes=100)  # the last first seed that the config allows
    assert largest.seed + largest.num_episodes < drawn.min()


def test_purposes_seeds_and_order_of_ids_give_unrelated_words():
    keys = [words(0, "a", 1, 2), words(0, "b", 1, 2), words(1, "a", 1, 2), words(0, "a", 2, 1), words(0, "a", 1)]
    assert len({int(key) for key in keys}) == len(keys)
    assert len(set(words(0, "a", np.arange(100_000)).tolist())) == 100_000
