"""Scripted experts: proportional control on privileged state, for end-effector deltas (pd_ee_delta_pose).

Each expert is a pure function of the current state, batched over rows, so that it can take over at any point of an
episode (after noise, for example).  Actions are [dx dy dz, three rotations, gripper] in [-1, 1]; 1 means 0.1 m of
target offset per control step, and gripper 1 is open.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from envs.tasks import TaskView

CONTROL_MODE = "pd_ee_delta_pose"
STEP_M = 0.1  # metres of target offset at action 1
GAIN = 0.8  # of the remaining way per control step; more overshoots
OPEN, CLOSED = 1.0, -1.0

Expert = Callable[[TaskView], Tensor]


def expert_of(task_id: str, view: TaskView) -> Expert | None:
    """Returns the scripted expert of a task, None where there is none for it, its robot or its control mode."""
    agent = view.agents[0]
    known = agent.control_mode == CONTROL_MODE and hasattr(agent, "is_grasping") and hasattr(agent, "tcp")
    return EXPERTS.get(task_id) if known else None


def _actions(move: Tensor, gripper: Tensor) -> Tensor:
    """Assembles actions [B, 7] from offsets in metres [B, 3] and gripper commands [B, 1]; no rotation."""
    return torch.cat([(move / STEP_M * GAIN).clamp(-1, 1), torch.zeros_like(move), gripper], 1)


def _approach(tcp: Tensor, target: Tensor, height: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """Returns the way [B, 3] to `target` that comes from `height` above it, and whether a row is right above [B, 1]."""
    way = target - tcp
    above = (way[:, :2].norm(dim=1) < tolerance)[:, None]
    hover = way + torch.tensor([0.0, 0.0, height], device=way.device)
    return torch.where(above, way, hover), above


def pick_cube(view: TaskView) -> Tensor:
    """Grasps the cube from above and carries it to the goal; actions [B, 7]."""
    task = view.env
    tcp, cube, goal = task.agent.tcp_pose.p, task.cube.pose.p, task.goal_site.pose.p
    way, above = _approach(tcp, cube, height=0.08, tolerance=0.012)
    grasped = task.agent.is_grasping(task.cube)[:, None]
    at_cube = above & ((cube - tcp)[:, 2:].abs() < 0.008)
    move = torch.where(grasped, goal - cube, way)
    gripper = torch.where(grasped | at_cube, CLOSED, OPEN)
    return _actions(move, gripper)


EXPERTS: dict[str, Expert] = {"PickCube-v1": pick_cube}
