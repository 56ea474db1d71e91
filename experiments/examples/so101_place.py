"""An SO-101 arm places a cube: the task of lerobot_env_so101 with an expert, and with the jaw's position observed.

docs/gymnasium.md explains it; so101_place.yaml next to it is the section `env` of a run.  It is imported in the
environment that `python -m experiments.setup.foreign env=so101` makes.
"""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces
from lerobot_env_so101 import SO101PickPlaceGymEnv  # pyright: ignore[reportMissingImports]

GRIP = np.array([0.0, 0.0, 0.013])  # m, from the cube's centre to the point that the jaws hold
CLEARANCE = 0.06  # m, height above this point at which the hand travels
LIMITS = np.array([1.0, 1.0, 0.5])  # largest action of the expert
OPEN, CLOSED = 0.9, 0.4  # opening of the jaw, of [0, 1]; around the cube it is 0.3


class Place(SO101PickPlaceGymEnv):
    """Observes the jaw's opening [1], the way from the hand to the grip [3] and from the cube to its goal [3].

    The ways are in units of `action_scale`, so that an action of 1 moves the hand by 1.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Box(-np.inf, np.inf, (7,), np.float32)

    def expert_action(self) -> np.ndarray:
        """Returns the next action [4], a function of the observation; the plug-in's controller counts steps instead."""
        (jaw,), way, to_goal = np.split(self._compute_observation().astype(np.float64), (1, 4))
        clearance, distance = CLEARANCE / self._action_scale, np.linalg.norm(way)
        near = 0.02 / self._action_scale
        if np.abs(to_goal).max() < near / 2:  # release
            return np.array([0.0, 0.0, 0.0, 1.0])
        if distance < near and jaw < CLOSED:  # lift, move, lower
            to_goal[2] += clearance * min(1.0, np.linalg.norm(to_goal[:2]) / (1.5 * near))
            to_goal[:2] *= np.clip(1.0 - to_goal[2] / clearance, 0.0, 1.0)
            return np.array([*to_goal.clip(-LIMITS, LIMITS), 0.0])
        if distance < (near / 3 if jaw > OPEN else near):  # close
            return np.zeros(4)
        way[2] += clearance * np.clip(np.linalg.norm(way[:2]) / near - 0.25, 0.0, 1.0)
        return np.array([*way.clip(-LIMITS, LIMITS), 1.0])

    def _compute_observation(self) -> np.ndarray:
        low, high = self.model.actuator("gripper").ctrlrange
        jaw = (self.data.joint("gripper").qpos - low) / (high - low)
        cube = self.data.sensor("block_pos").data
        ways = np.concatenate([cube + GRIP - self.ik_point_pos, self.goal_pos - cube])
        return np.concatenate([jaw, ways / self._action_scale]).astype(np.float32)


gymnasium.register("SO101Place-v0", Place)
