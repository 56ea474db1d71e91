"""Statistics of LeRobot datasets against numpy's, of episodes and of all of them together."""

from __future__ import annotations

import numpy as np

from rlinf_embodied.data.lerobot_writer import joined, statistics


def test_vectors_numbers_and_images_have_numpys_statistics_in_lerobots_shapes() -> None:
    drawn = np.random.default_rng(0)
    vectors, numbers = drawn.normal(size=(7, 3)).astype(np.float32), np.arange(7)
    images = drawn.integers(0, 256, (7, 4, 5, 3), dtype=np.uint8)
    shares = images.transpose(0, 3, 1, 2) / 255
    for values, expected, axes in (
        (vectors, vectors, (0,)),
        (numbers, numbers[:, None], (0,)),
        (images, shares, (0, 2, 3)),
    ):
        found = statistics(values)
        assert found["count"] == [7]
        for name in ("min", "max", "mean", "std"):
            wanted = getattr(np, name)(expected.astype(np.float64), axis=axes)
            shape = (3, 1, 1) if values is images else wanted.shape
            assert np.array(found[name]).shape == shape
            assert np.allclose(np.array(found[name]).ravel(), wanted, atol=1e-9)


def test_joined_statistics_are_those_of_all_frames() -> None:
    parts = [np.random.default_rng(k).normal(k, 1 + k, (length, 2)) for k, length in enumerate((1, 5, 30))]
    found, expected = joined([statistics(part) for part in parts]), statistics(np.concatenate(parts))
    assert found["count"] == expected["count"] == [36]
    for name in ("min", "max", "mean", "std"):
        assert np.allclose(found[name], expected[name])
