"""The seeds and random draws of N rows: each row has separate generators, and draws what a single env would draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
from mani_skill.envs.utils.randomization import pose as randomized
from torch import Tensor

FIRST_SEED = 2022  # ManiSkill builds a single env with it
DRAWS_BY_ROW = frozenset({"PickCube-v1", "PushCube-v1", "PullCube-v1"})


class RowStates:
    """Stands in for ManiSkill's `_episode_rng` for rows that are initialised together; one generator per row."""

    def __init__(self, states: Sequence[np.random.RandomState]) -> None:
        self._states = states

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> np.ndarray:
        """Returns normal draws, `size` leading with the number of rows."""
        assert size[0] == len(self._states), f"a draw of size {size} for {len(self._states)} rows"
        return np.stack([state.normal(loc, scale, size[1:]) for state in self._states])


class _RowTorch:
    """Stands in for the module torch in code that draws for b rows: its `rand` draws from b generators."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def rand(self, *size: object, **kwargs: object) -> Tensor:
        size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        assert size[0] == len(self._generators), f"a draw of size {size} for {len(self._generators)} rows"
        return torch.cat([torch.rand(1, *size[1:], generator=generator) for generator in self._generators])


@contextmanager
def row_draws(function: Callable, seeds: Sequence[int]) -> Iterator[Callable]:
    """Gives a copy of a task's function whose `torch.rand((b, ...))` draws from generators seeded with the rows' seeds.

    It must not draw in another way; the state of torch's global generator is checked for that.
    """
    drawing = _RowTorch(seeds)
    quaternions = _with_names(randomized.random_quaternions, torch=drawing)
    before = torch.default_generator.get_state()
    yield _with_names(function, torch=drawing, randomization=SimpleNamespace(random_quaternions=quaternions))
    drawn = not torch.equal(before, torch.default_generator.get_state())
    assert not drawn, "something was drawn by another call than torch.rand: take the task out of DRAWS_BY_ROW"


def _with_names(function: Callable, **names: object) -> Callable:
    """Returns a copy of a function in which these global names have other values."""
    global_names = {**function.__globals__, **names}
    return FunctionType(function.__code__, global_names, function.__name__, function.__defaults__, function.__closure__)
