"""Spaces of Gymnasium as this project's vectors: actions in [-1, 1], and observations that are a state or an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import SimulatorError


@dataclass(frozen=True, slots=True)
class ActionCode:
    """Maps a vector in [-1, 1], or in the space's units, to an action."""

    dim: int  # A
    categorical: bool  # the action is the number of the largest entry, plus `start`
    start: int = 0
    shape: tuple[int, ...] = ()
    dtype: np.typing.DTypeLike = np.float32
    centre: np.ndarray | float = 0.0  # of the bounds, [A]
    half: np.ndarray | float = 1.0  # half their distance, [A]
    is_physical: bool = False  # whether vectors are in the space's units

    @classmethod
    def of(cls, space: spaces.Space, task: str, is_physical: bool = False) -> ActionCode:
        """Returns the code of an action space, or raises SimulatorError unless it is a bounded Box or Discrete."""
        if isinstance(space, spaces.Discrete):
            rule = "its actions are choices"
            require(not is_physical, "env.options.physical_actions", is_physical, rule, "leave it out")
            return cls(int(space.n), True, int(space.start))
        if not isinstance(space, spaces.Box):
            raise SimulatorError(
                f"env.task is {task!r}, whose actions are {space}, but they must be Box or Discrete: put a wrapper "
                "around it that makes them one of these, and register that"
            )
        if not space.is_bounded():
            raise SimulatorError(
                f"env.task is {task!r}, whose actions {space} have no bounds, but [-1, 1] is mapped to their bounds: "
                "put gymnasium.wrappers.RescaleAction or ClipAction's bounds around it, and register that"
            )
        low, high = (bound.astype(np.float64).reshape(-1) for bound in (space.low, space.high))
        return cls(low.size, False, 0, space.shape, space.dtype, (high + low) / 2, (high - low) / 2, is_physical)

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Returns the vector that `decode` maps to this action, float32 [A]."""
        values = np.asarray(action, np.float64).reshape(-1)
        return (values if self.is_physical else ((values - self.centre) / self.half).clip(-1.0, 1.0)).astype(np.float32)

    def decode(self, actions: np.ndarray) -> np.ndarray | list[int]:
        """Returns the env's action for each of N vectors [N, A]; values are clipped to [-1, 1], or to the bounds."""
        if self.categorical:
            return (self.start + actions.argmax(1)).tolist()
        if self.is_physical:
            scaled = actions.clip(self.centre - self.half, self.centre + self.half)
        else:
            scaled = self.centre + self.half * actions.clip(-1.0, 1.0)
        return scaled.astype(self.dtype).reshape(-1, *self.shape)


@dataclass(frozen=True, slots=True)
class ObservationCode:
    """Splits an observation into a state [P] and an image; an observation that is an image has no state."""

    rest: Sequence[tuple[tuple[str, ...], spaces.Space]]  # parts of the state: path of keys in nested Dicts, and space
    path: tuple[str, ...] | None  # path of keys of the image; None: no image
    dim: int  # P

    @classmethod
    def of(cls, space: spaces.Space, task: str) -> ObservationCode:
        """Returns the code of an observation space.

        Raises:
            SimulatorError: the space cannot be flattened to numbers, or has several images.
        """
        rest, images = [], []
        for path, part in _parts(space):
            is_image = isinstance(part, spaces.Box) and part.dtype == np.uint8 and len(part.shape) in (2, 3)
            images += [path] if is_image else []
            rest += [] if is_image else [(path, part)]
        if len(images) > 1:
            names = ", ".join("/".join(path) for path in images)
            raise SimulatorError(
                f"env.task is {task!r}, whose observations have several images ({names}), but a Gymnasium env has one "
                "camera: put a wrapper around it that keeps one of them, and register that"
            )
        if not all(part.is_np_flattenable for _, part in rest):
            raise SimulatorError(
                f"env.task is {task!r}, whose observations are {space}, but they must have a fixed number of entries: "
                "put a wrapper around it that makes them a Box, and register that"
            )
        return cls(rest, images[0] if images else None, sum(spaces.flatdim(part) for _, part in rest))

    @property
    def is_image(self) -> bool:
        return self.path is not None

    def state(self, observation: Any) -> np.ndarray:
        """Returns the state [P], empty for an observation that is an image."""
        parts = [spaces.flatten(part, _at(path, observation)) for path, part in self.rest]
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0)

    def image(self, observation: Any) -> np.ndarray:
        return _at(self.path or (), observation)


def _parts(space: spaces.Space, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], spaces.Space]]:
    """Returns the leaves of nested Dicts with their paths of keys."""
    if not isinstance(space, spaces.Dict):
        return [(path, space)]
    return [leaf for key, part in space.spaces.items() for leaf in _parts(part, (*path, key))]


def _at(path: tuple[str, ...], observation: Any) -> Any:
    for key in path:
        observation = observation[key]
    return observation
