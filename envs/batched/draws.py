"""Random draws for many rows at once, each row from its own generators: the numbers each row would draw alone.

ManiSkill draws the initial states of b rows together, `torch.rand((b, 2))`, from one generator.  Within `row_draws` a
call like that takes row k's numbers from row k's generator, so that rows can be initialised together and still be
functions of their seeds.  That is exact for a task whose draws all lead with the number of rows and do not depend on
what other rows drew (rejection sampling does); such tasks are listed here, and a test compares them with rows that are
initialised one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

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


class _RowDraws(TorchFunctionMode):
    """Answers `torch.rand((b, ...))` with draws from b generators; only this thread's calls come here."""

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is not torch.rand:
            return func(*args, **(kwargs or {}))
        size = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args
        assert size[0] == len(self._generators), f"a draw of size {size} for {len(self._generators)} rows"
        return torch.cat([torch.rand(1, *size[1:], generator=generator) for generator in self._generators])


@contextmanager
def row_draws(seeds: Sequence[int]) -> Iterator[None]:
    """Within it, `torch.rand((b, ...))` draws each row's numbers from a generator seeded with the row's seed.

    Nothing else may be drawn, which is seen from the state of torch's global generator.
    """
    before = torch.default_generator.get_state()
    with torch._C._EnableTorchFunction(), _RowDraws(seeds):  # `few_operations` switches modes off
        yield
    drawn = not torch.equal(before, torch.default_generator.get_state())
    assert not drawn, "something was drawn by another call than torch.rand: take the task out of DRAWS_BY_ROW"
