"""Whether grippers hold an object: what ManiSkill's robots compute, with half of the operations, or a quarter.

A few dozen rows are so little work that the number of operations is the cost.  Both fingers are computed at once; the
angles are left out where no row has force on both.
"""

from __future__ import annotations

import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.robots import SO100, Fetch, Panda
from mani_skill.utils import common
from mani_skill.utils.structs import Actor, Pose
from torch import Tensor

# By robot, of those whose assets ship with ManiSkill: fingers 1 and 2 open along their y axes (1) or against them (-1).
OPENING = {
    Panda: (1.0, -1.0),
    Fetch: (-1.0, 1.0),
    SO100: (1.0, -1.0),
}


def is_grasping(
    opening: tuple[float, float],
    limits: tuple[float, float],
    robot: BaseAgent,
    object: Actor,
    min_force: float | None = None,
    max_angle: float | None = None,
) -> Tensor:
    """Returns whether each row's robot holds the object, bool [N].

    Args:
        opening: see OPENING.
        limits: the robot's own for the next two arguments.
        robot: of all rows.
        object: of all rows.
        min_force: of each finger on the object, in N.
        max_angle: between this force and the direction in which the finger opens, in degrees.
    """
    min_force = limits[0] if min_force is None else min_force
    max_angle = limits[1] if max_angle is None else max_angle
    fingers = robot.finger1_link, robot.finger2_link
    impulses = [robot.scene.get_pairwise_contact_impulses(finger, object) for finger in fingers]
    forces = torch.cat(impulses) / robot.scene.px.timestep
    pressing = (torch.linalg.norm(forces, axis=1) >= min_force).view(2, -1)
    holding = pressing[0] & pressing[1]
    if not holding.any():
        return holding
    poses = Pose(torch.cat([finger.pose.raw_pose for finger in fingers]))
    sides = poses.to_transformation_matrix()[..., :3, 1].reshape(2, -1, 3) * torch.tensor(opening)[:, None, None]
    angles = torch.rad2deg(common.compute_angle_between(sides.reshape(-1, 3), forces)).view(2, -1)
    facing = angles <= max_angle
    return holding & facing[0] & facing[1]
