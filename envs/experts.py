"""Scripted experts: proportional control on privileged state, for end-effector deltas (pd_ee_delta_pose).

Each expert is a pure function of the current state, batched over rows, so that it can take over at any point of an
episode (after noise, for example).  Actions are [dx dy dz, three rotations, gripper] in [-1, 1]; 1 means 0.1 m of
target offset per control step, and gripper 1 is open.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mani_skill.utils.geometry.rotation_conversions import quaternion_to_matrix
from torch import Tensor

from envs.expert_tasks import CONTROL_MODE
from envs.tasks import TaskView

NUM_ACTIONS = 7
TURN_RAD = 0.1  # radians at action 1
STEP_M = 0.1  # metres of target offset at action 1
CLEAR_RAD = 0.8  # least angle between the line of the fingers and a neighbour ...
NEAR_M = 0.09  # ... that is nearer than this
GAIN = 0.8  # of the remaining way per control step; more overshoots
OPEN, CLOSED = 1.0, -1.0

Expert = Callable[[TaskView], Tensor]


def expert_of(task_id: str, view: TaskView) -> Expert | None:
    """Returns the scripted expert of a task, None where there is none for it, its robot or its control mode."""
    agent = view.agents[0]
    known = agent.control_mode == CONTROL_MODE and hasattr(agent, "is_grasping") and hasattr(agent, "tcp")
    arm_only = view.env.single_action_space.shape == (NUM_ACTIONS,)  # a mobile robot has a body and wheels besides
    return EXPERTS.get(task_id) if known and arm_only else None


def _actions(move: Tensor, gripper: Tensor, turn: Tensor | None = None) -> Tensor:
    """Assembles actions [B, 7] of offsets [B, 3] (metres), gripper commands [B, 1] and turns about z [B] (radians)."""
    rotation = torch.zeros_like(move)
    if turn is not None:
        rotation[:, 2] = (-turn / TURN_RAD).clamp(-1, 1)  # ManiSkill scales rotations by the negative bound
    return torch.cat([(move / STEP_M * GAIN).clamp(-1, 1), rotation, gripper], 1)


def _approach(way: Tensor, height: float, tolerance: float) -> Tensor:
    """Returns the way [B, 3] that comes down from `height` once it is within `tolerance` sideways."""
    hover = way + torch.tensor([0.0, 0.0, height], device=way.device)
    return torch.where(way[:, :2].norm(dim=1, keepdim=True) < tolerance, way, hover)


def _reached(way: Tensor, tolerance: float, height: float) -> Tensor:
    """Whether nothing but `tolerance` sideways and `height` downwards is left of a way [B, 3], as [B, 1]."""
    return (way[:, :2].norm(dim=1, keepdim=True) < tolerance) & (way[:, 2:].abs() < height)


def pick_cube(view: TaskView) -> Tensor:
    """Grasps the cube from above and carries it to the goal; actions [B, 7]."""
    task = view.env
    tcp, cube, goal = task.agent.tcp_pose.p, task.cube.pose.p, task.goal_site.pose.p
    way = cube - tcp
    grasped = task.agent.is_grasping(task.cube)[:, None]
    move = torch.where(grasped, goal - cube, _approach(way, height=0.08, tolerance=0.012))
    gripper = torch.where(grasped | _reached(way, tolerance=0.012, height=0.008), CLOSED, OPEN)
    return _actions(move, gripper)


def _shove(view: TaskView, direction: float) -> Tensor:
    """Goes down on the near side of the cube, fingers closed, and shoves it along x; actions [B, 7]."""
    task = view.env
    tcp, cube, goal = task.agent.tcp_pose.p, task.obj.pose.p, task.goal_region.pose.p
    way = cube - tcp
    start = way - torch.tensor([direction * 0.055, 0.0, 0.0], device=way.device)
    behind = (way[:, :1] * direction > 0.02) & (way[:, 1:2].abs() < 0.015) & (way[:, 2:].abs() < 0.015)
    shove = torch.cat([goal[:, :1] - cube[:, :1] + direction * 0.02, way[:, 1:]], 1)
    move = torch.where(behind, shove, _approach(start, height=0.08, tolerance=0.015))
    return _actions(move, torch.full_like(move[:, :1], CLOSED))


def push_cube(view: TaskView) -> Tensor:
    """Shoves the cube away from the robot onto the goal; actions [B, 7]."""
    return _shove(view, direction=1.0)


def pull_cube(view: TaskView) -> Tensor:
    """Shoves the cube towards the robot onto the goal; actions [B, 7]."""
    return _shove(view, direction=-1.0)


def stack_cube(view: TaskView) -> Tensor:
    """Grasps the red cube, carries it over the green one, sets it down and lets go; actions [B, 7]."""
    task = view.env
    tcp, red, green = task.agent.tcp_pose.p, task.cubeA.pose.p, task.cubeB.pose.p
    up = torch.tensor([0.0, 0.0, 1.0], device=tcp.device)
    way, carry = red - tcp, green + 0.04 * up - red
    grasped = task.agent.is_grasping(task.cubeA)[:, None]
    placed = (carry[:, :2].norm(dim=1, keepdim=True) < 0.01) & (carry[:, 2:].abs() < 0.006)
    over = _approach(carry, height=0.03, tolerance=0.015)
    low = red[:, 2:] < green[:, 2:] + 0.045  # rise before going sideways, or the cubes touch
    over = torch.where(low & (carry[:, :2].norm(dim=1, keepdim=True) > 0.01), over * up, over)
    turn = _clearing_turn(task.agent.tcp_pose.q, green - red)
    turned = turn.abs()[:, None] < 0.1
    reach = torch.where(turned, _approach(way, height=0.08, tolerance=0.012), way + 0.06 * up)
    move = torch.where(grasped, over, reach)
    move = torch.where(placed, torch.where(grasped, torch.zeros_like(way), 0.05 * up), move)
    at_cube = _reached(way, tolerance=0.012, height=0.008)
    gripper = torch.where((grasped | at_cube) & ~placed, CLOSED, OPEN)
    return _actions(move, gripper, torch.where((grasped | placed)[:, 0], 0.0, turn))


def _clearing_turn(tool_q: Tensor, neighbour: Tensor) -> Tensor:
    """Returns the turn about z [B] in radians that keeps the open fingers clear of a cube's neighbour.

    Turns are slow (the arm follows 0.04 rad per step), so it is no larger than needed.

    Args:
        tool_q: quaternions of the tool [B, 4]; its y axis is the one along which the fingers close.
        neighbour: way from the cube to the other one [B, 3] in metres.
    """
    across = quaternion_to_matrix(tool_q)[:, :2, 1]
    angle = torch.atan2(across[:, 1], across[:, 0]) - torch.atan2(neighbour[:, 1], neighbour[:, 0])
    angle = torch.remainder(angle + torch.pi / 2, torch.pi) - torch.pi / 2  # from the neighbour's direction, a line
    missing = (CLEAR_RAD - angle.abs()).clamp(min=0.0)
    near = neighbour[:, :2].norm(dim=1) < NEAR_M
    return torch.where(near, torch.where(angle < 0, -missing, missing), 0.0)


EXPERTS: dict[str, Expert] = {
    "PickCube-v1": pick_cube,
    "PushCube-v1": push_cube,
    "PullCube-v1": pull_cube,
    "StackCube-v1": stack_cube,
}
