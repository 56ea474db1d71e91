"""How far an arm reaches: a target beyond it has no solution, which need not be found out by a hundred iterations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envs.batched.rotations import turned

# A solution may be off by 1e-4, rad and m together, and the poses are float32: far less than this.
MARGIN = 1e-3
UNIT = 1e-5  # by how much a quaternion's length may be off
SWEEPS = 20


@dataclass(frozen=True, slots=True)
class Reach:
    """A ball, in the frame of the robot's base, that a point of the controlled link cannot leave."""

    centre: np.ndarray  # [3], on the first joint's axis
    radius: float
    point: np.ndarray  # [3] in the frame of the link, on the last joint's axis

    def is_beyond(self, poses: np.ndarray) -> np.ndarray:
        """Returns whether poses of the link (x, y, z, qw, qx, qy, qz) [R, 7] are surely out of reach, bool [R]."""
        poses = poses.astype(np.float64)
        allowed = self.radius + MARGIN * (1.0 + np.linalg.norm(self.point))
        with np.errstate(all="ignore"):  # poses that are not numbers are not beyond
            offset = poses[:, :3] + turned(poses[:, 3:], self.point[None]) - self.centre
            is_unit = np.abs((poses[:, 3:] ** 2).sum(1) - 1.0) < UNIT
            return is_unit & ((offset * offset).sum(1) > allowed**2)


def reach_of(rotations: np.ndarray, offsets: np.ndarray, tool_rotation: np.ndarray, tool_offset: np.ndarray) -> Reach:
    """Returns the reach of a chain of revolute joints, each about the z axis of its frame, whatever their limits.

    One point is chosen on each joint's axis.  A point on an axis keeps its place when the joint turns, so that two
    neighbouring points keep their distance, and no arm is longer than the sum of these.  Any choice is right; that
    with the smallest sum is the best.

    Args:
        rotations: of each joint's frame in that of the joint before it [J, 3, 3].
        offsets: of its origin there [J, 3].
        tool_rotation: of the last joint's frame in that of the link [3, 3].
        tool_offset: of its origin there [3].
    """
    along = np.zeros(len(offsets))  # of the points on their axes

    def length(j: int) -> float:
        """Returns the distance of the points of joints j and j + 1."""
        if not 0 <= j < len(offsets) - 1:
            return 0.0
        return float(np.linalg.norm(offsets[j + 1] + rotations[j + 1][:, 2] * along[j + 1] - [0.0, 0.0, along[j]]))

    def move(j: int, value: float) -> float:
        along[j] = value
        return length(j - 1) + length(j)

    span = np.linalg.norm(offsets, axis=1).sum()
    for _ in range(SWEEPS):
        for j in range(len(along)):
            low, high = along[j] - span, along[j] + span
            while high - low > 1e-9:  # the sum is convex
                third = (high - low) / 3
                if move(j, low + third) < move(j, high - third):
                    high -= third
                else:
                    low += third
            move(j, 0.5 * (low + high))
    return Reach(
        centre=offsets[0] + rotations[0][:, 2] * along[0],
        radius=sum(length(j) for j in range(len(along))),
        point=tool_offset + tool_rotation[:, 2] * along[-1],
    )
