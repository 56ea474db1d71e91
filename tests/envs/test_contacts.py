"""The sum of contact impulses has the bits of ManiSkill's own."""

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.sim  # importing ManiSkill takes seconds


@pytest.mark.parametrize("num_points", [[], [0], [1], [4], [3, 0, 1], [40, 7]])
def test_the_total_impulse_is_that_of_maniskill_bit_for_bit(num_points: list[int]) -> None:
    from mani_skill.utils.sapien_utils import compute_total_impulse

    from envs.batched.contacts import total_impulse

    random = np.random.default_rng(0)

    def draw() -> SimpleNamespace:
        return SimpleNamespace(impulse=(random.standard_normal(3) * 10.0 ** random.integers(-6, 3)).astype("f4"))

    contacts = [
        (SimpleNamespace(points=[draw() for _ in range(count)]), bool(k % 2)) for k, count in enumerate(num_points)
    ]
    assert total_impulse(contacts).tobytes() == np.asarray(compute_total_impulse(contacts)).tobytes()
