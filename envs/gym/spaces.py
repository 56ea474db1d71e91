"""Spaces of Gymnasium as this project's vectors: actions in [-1, 1], and observations that are a state or an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import Env, spaces

from rlinf_embodied.errors import SimulatorError


@dataclass(frozen=True, slots=True)
class ActionCode:
    """How a vector in [-1, 1] becomes an action."""

    dim: int  # A
    categorical: bool  # the action is the number of the largest entry, plus `start`
    start: int = 0
    shape: tuple[int, ...] = ()
    dtype: np.typing.DTypeLike = np.float32
    centre: np.ndarray | float = 0.0  # of the bounds, [A]
    half: np.ndarray | float = 1.0  # of their distance, [A]

    @classmethod
    def of(cls, space: spaces.Space, task: str) -> ActionCode:
        """Returns the code of an action space.

        Raises:
            SimulatorError: the space is neither a bounded Box nor Discrete.
        """
        if isinstance(space, spaces.Discrete):
            return cls(int(space.n), True, int(space.start))
        if not isinstance(space, spaces.Box):
            raise SimulatorError(
                f"env.task is {task!r}, whose actions are {space}, but actions here are Box or Discrete: put a "
                "wrapper around it that makes them one of these, and register that"
            )
        if not space.is_bounded():
            raise SimulatorError(
                f"env.task is {task!r}, whose actions {space} have no bounds, but [-1, 1] is mapped to their bounds: "
                "put gymnasium.wrappers.RescaleAction or ClipAction's bounds around it, and register that"
            )
        low, high = (bound.astype(np.float64).reshape(-1) for bound in (space.low, space.high))
        return cls(low.size, False, 0, space.shape, space.dtype, (high + low) / 2, (high - low) / 2)

    def decode(self, action: np.ndarray) -> np.ndarray | int:
        """Returns the env's action for a vector [A]; what lies outside of [-1, 1] is clipped."""
        if self.categorical:
            return self.start + int(action.argmax())
        scaled = self.centre + self.half * action.clip(-1.0, 1.0)
        return scaled.astype(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ObservationCode:
    """How an observation becomes a state [P], or an image; an observation that is an image has no state."""

    space: spaces.Space
    is_image: bool
    dim: int  # P

    @classmethod
    def of(cls, space: spaces.Space, task: str) -> ObservationCode:
        """Returns the code of an observation space.

        Raises:
            SimulatorError: the space cannot be flattened to numbers.
        """
        if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3):
            return cls(space, True, 0)
        if not space.is_np_flattenable:
            raise SimulatorError(
                f"env.task is {task!r}, whose observations are {space}, but they must have a fixed number of entries: "
                "put a wrapper around it that makes them a Box, and register that"
            )
        return cls(space, False, spaces.flatdim(space))

    def state(self, observation: object) -> np.ndarray:
        """Returns the state [P]; of an image nothing."""
        if self.is_image:
            return np.empty(0)
        plain = isinstance(self.space, spaces.Box)
        return np.asarray(observation).reshape(-1) if plain else spaces.flatten(self.space, observation)


def told_success(info: dict[str, object]) -> bool | None:
    """Returns whether the task is solved, as Gymnasium-Robotics, Stable-Baselines3 and MetaWorld tell it, or None."""
    for name in ("is_success", "success"):
        if name in info:
            return bool(info[name])
    return None


def is_history_free(env: Env) -> bool:
    """Whether Gymnasium's own code promises that seed and actions decide an episode: its resets restore everything."""
    ours = ("gymnasium.envs.mujoco.", "gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
    return type(env.unwrapped).__module__.startswith(ours)
