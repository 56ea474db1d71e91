"""Spaces of Gymnasium as this project's vectors: actions in [-1, 1], and observations that are a state or an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Env, spaces

from rlinf_embodied.errors import SimulatorError


@dataclass(frozen=True, slots=True)
class ActionCode:
    """Maps a vector in [-1, 1] to an action."""

    dim: int  # A
    categorical: bool  # the action is the number of the largest entry, plus `start`
    start: int = 0
    shape: tuple[int, ...] = ()
    dtype: np.typing.DTypeLike = np.float32
    centre: np.ndarray | float = 0.0  # of the bounds, [A]
    half: np.ndarray | float = 1.0  # half their distance, [A]

    @classmethod
    def of(cls, space: spaces.Space, task: str) -> ActionCode:
        """Returns the code of an action space, or raises SimulatorError unless it is a bounded Box or Discrete."""
        if isinstance(space, spaces.Discrete):
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
        return cls(low.size, False, 0, space.shape, space.dtype, (high + low) / 2, (high - low) / 2)

    def decode(self, action: np.ndarray) -> np.ndarray | int:
        """Returns the env's action for a vector [A]; values are clipped to [-1, 1]."""
        if self.categorical:
            return self.start + int(action.argmax())
        scaled = self.centre + self.half * action.clip(-1.0, 1.0)
        return scaled.astype(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ObservationCode:
    """Splits an observation into a state [P] and an image; an observation that is an image has no state."""

    rest: spaces.Space | None  # the spaces of the state
    path: tuple[str, ...] | None  # keys of nested Dicts that lead to the image; None: no image
    dim: int  # P

    @classmethod
    def of(cls, space: spaces.Space, task: str) -> ObservationCode:
        """Returns the code of an observation space.

        Raises:
            SimulatorError: the space cannot be flattened to numbers, or has several images.
        """
        paths = _images_in(space)
        if len(paths) > 1:
            names = ", ".join("/".join(path) for path in paths)
            raise SimulatorError(
                f"env.task is {task!r}, whose observations have several images ({names}), but a Gymnasium env has one "
                "camera: put a wrapper around it that keeps one of them, and register that"
            )
        path = paths[0] if paths else None
        rest = space if path is None else _without(space, path)
        if rest is None:
            return cls(None, path, 0)
        if not rest.is_np_flattenable:
            raise SimulatorError(
                f"env.task is {task!r}, whose observations are {space}, but they must have a fixed number of entries: "
                "put a wrapper around it that makes them a Box, and register that"
            )
        return cls(rest, path, spaces.flatdim(rest))

    @property
    def is_image(self) -> bool:
        return self.path is not None

    def state(self, observation: Any) -> np.ndarray:
        """Returns the state [P], empty for an observation that is an image."""
        if self.rest is None:
            return np.empty(0)
        if isinstance(self.rest, spaces.Box):
            return np.asarray(observation).reshape(-1)
        return spaces.flatten(self.rest, _kept(self.rest, observation) if self.path else observation)

    def image(self, observation: Any) -> np.ndarray:
        for key in self.path or ():
            observation = observation[key]
        return observation


def _images_in(space: spaces.Space) -> list[tuple[str, ...]]:
    """Returns the keys that lead to the images of nested Dicts."""
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3):
        return [()]
    if not isinstance(space, spaces.Dict):
        return []
    return [(key, *path) for key, part in space.spaces.items() for path in _images_in(part)]


def _without(space: spaces.Space, path: tuple[str, ...]) -> spaces.Space | None:
    """Returns nested Dicts without the part at `path`, None if nothing is left."""
    if not path:
        return None
    assert isinstance(space, spaces.Dict)
    parts = {key: _without(part, path[1:]) if key == path[0] else part for key, part in space.spaces.items()}
    left = {key: part for key, part in parts.items() if part is not None}
    return spaces.Dict(left) if left else None


def _kept(space: spaces.Space, observation: Any) -> Any:
    """Returns the part of an observation that is in a space made by `_without`."""
    if not isinstance(space, spaces.Dict):
        return observation
    return {key: _kept(part, observation[key]) for key, part in space.spaces.items()}


def success_in(info: dict[str, object]) -> bool | None:
    """Returns the success in `info` under the names that Gymnasium-Robotics and MetaWorld use, None without one."""
    for name in ("is_success", "success"):
        if name in info:
            return bool(info[name])
    return None


def is_history_free(env: Env) -> bool:
    """Returns whether this is one of Gymnasium's own envs whose resets restore everything."""
    ours = ("gymnasium.envs.mujoco.", "gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
    return type(env.unwrapped).__module__.startswith(ours)
