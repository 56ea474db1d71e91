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
from torch.overrides import TorchFunctionMode

DRAWS_BY_ROW = frozenset({"PickCube-v1", "PushCube-v1", "PullCube-v1"})
_OTHER_DRAWS = frozenset(
    {torch.randn, torch.randint, torch.randperm, torch.normal, torch.rand_like, torch.randn_like, torch.randint_like}
    | {torch.bernoulli, torch.multinomial, Tensor.uniform_, Tensor.normal_, Tensor.random_}
)


class RowStates:
    """Plays ManiSkill's `_episode_rng` for rows that are initialised together."""

    def __init__(self, states: Sequence[np.random.RandomState]) -> None:
        """`states` has one generator per row."""
        self._states = states

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> np.ndarray:
        """Returns normal draws, `size` leading with the number of rows."""
        assert size[0] == len(self._states), f"a draw of size {size} for {len(self._states)} rows"
        return np.stack([state.normal(loc, scale, size[1:]) for state in self._states])


class _RowRand(TorchFunctionMode):
    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func not in _OTHER_DRAWS, f"{func} is not drawn row by row: take the task out of DRAWS_BY_ROW"
        if func is not torch.rand:
            return func(*args, **kwargs)
        size = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args
        assert size[0] == len(self._generators), f"a draw of size {size} for {len(self._generators)} rows"
        return torch.cat([torch.rand(1, *size[1:], generator=generator) for generator in self._generators])


@contextmanager
def row_draws(seeds: Sequence[int]) -> Iterator[None]:
    """Within it, `torch.rand((b, ...))` draws each row's numbers from a generator seeded with the row's seed."""
    with _RowRand(seeds):
        yield
