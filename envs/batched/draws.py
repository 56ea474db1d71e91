"""Random draws for many rows at once, each row from its own generators: the numbers each row would draw alone.

ManiSkill draws the initial states of b rows together, `torch.rand((b, 2))`, from one generator.  Within `row_draws` a
call like that takes row k's numbers from row k's generator, so that rows can be initialised together and still be
functions of their seeds.  That is exact for a task whose draws all lead with the number of rows and do not depend on
what other rows drew (rejection sampling does); such tasks are listed here, and a test compares them with rows that are
initialised one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

DRAWS_BY_ROW = frozenset({"PickCube-v1", "PushCube-v1", "PullCube-v1"})


class RowStates:
    """Plays ManiSkill's `_episode_rng` for rows that are initialised together."""

    def __init__(self, states: Sequence[np.random.RandomState]) -> None:
        """`states` has one generator per row."""
        self._states = states

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> np.ndarray:
        """Returns normal draws, `size` leading with the number of rows."""
        assert size[0] == len(self._states), f"a draw of size {size} for {len(self._states)} rows"
        return np.stack([state.normal(loc, scale, size[1:]) for state in self._states])


@contextmanager
def row_draws(seeds: Sequence[int]) -> Iterator[None]:
    """Within it, `torch.rand((b, ...))` draws each row's numbers from a generator seeded with the row's seed.

    Nothing else may be drawn, which is seen from the state of torch's global generator.
    """
    generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
    stock = torch.rand

    def rand(*size: object, **kwargs: object) -> Tensor:
        size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        assert size[0] == len(generators), f"a draw of size {size} for {len(generators)} rows"
        return torch.cat([stock(1, *size[1:], generator=generator) for generator in generators])

    before = torch.default_generator.get_state()
    torch.rand = rand
    try:
        yield
    finally:
        torch.rand = stock
    drawn = not torch.equal(before, torch.default_generator.get_state())
    assert not drawn, "something was drawn by another call than torch.rand: take the task out of DRAWS_BY_ROW"
