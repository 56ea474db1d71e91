"""The values read from a ManiSkill task (instruction, proprioception, privileged state, reward), and scripted experts.

An expert is a pure function of the current state, batched over rows, so that it can take over at any point of an
episode: proportional control on privileged state for pd_ee_delta_pose.  Actions are [dx dy dz, three rotations,
gripper] in [-1, 1]; 1 means 0.1 m of target offset per control step, and gripper 1 is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.geometry.rotation_conversions import quaternion_to_matrix
from mani_skill.utils.structs import Actor
from torch import Tensor

from envs.maniskill import CONTROL_MODE
from envs.simulator import Measurement

INSTRUCTIONS = {
    "PickCube-v1": "pick up the cube",
    "PushCube-v1": "push the cube to the goal",
    "PullCube-v1": "pull the cube to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "LiftPegUpright-v1": "lift the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole",
    "PlaceSphere-v1": "place the sphere in the bin",
    "RollBall-v1": "roll the ball to the goal",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCubeTool-v1": "pull the cube with the tool",
    "StackPyramid-v1": "stack the cubes to a pyramid",
}
OFFSET_SCALE = 5.0  # offsets are centimetres to decimetres, other entries of the state are of order one


def instruction_of(task_id: str) -> str:
    """Returns the instruction of a task: from INSTRUCTIONS, or its name ("PlugCharger-v1" -> "plug charger")."""
    name = re.sub(r"-v\d+$", "", task_id)
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-_]+", " ", name).lower()
    return INSTRUCTIONS.get(task_id, " ".join(spaced.split()))


class TaskView:
    """Reads one ManiSkill env object of B rows; B does not change a row's bits."""

    def __init__(self, env: BaseEnv, goal_in_proprio: bool, objects_in_proprio: bool = False) -> None:
        """Finds the robots, the goal and the objects of the task, which stay the same for the life of `env`."""
        self.env, self._goal_in_proprio = env, goal_in_proprio
        self._objects_in_proprio = objects_in_proprio
        self.agents = env.agent.agents if isinstance(env.agent, MultiAgent) else [env.agent]
        scene, rows = env.scene, env.num_envs
        actors = {
            name: actor
            for name, actor in {**scene.actors, **scene.actor_views}.items()
            if actor.px_body_type != "static" and len(actor._objs) == rows and "table" not in name.lower()
        }
        self.goal: Actor | None = next((actor for name, actor in actors.items() if "goal" in name.lower()), None)
        self.objects = [actor for actor in actors.values() if actor is not self.goal]
        robots = {id(agent.robot) for agent in self.agents}
        every = [*scene.articulations.values(), *scene.articulation_views.values()]
        self.mechanisms = [a for a in every if len(a._objs) == rows and id(a) not in robots]
        self._grasp_keys: list[str] | None = None

    def measure(self, actions: Tensor) -> Measurement:
        """Evaluates the current state once; `actions` [B, A] led to it (a few rewards depend on them)."""
        info = self.env.get_info()
        reward = torch.as_tensor(self.env.get_reward(obs={}, action=actions, info=info), dtype=torch.float32)
        zeros = torch.zeros(self.env.num_envs, 7, device=self.env.device)  # for a robot without a tool (a cart-pole)
        tools = [getattr(agent, "tcp", None) for agent in self.agents]
        tcp = [zeros if tool is None else tool.pose.raw_pose for tool in tools]  # position and quaternion
        qpos = [agent.robot.get_qpos() for agent in self.agents]
        return Measurement(
            reward=reward.reshape(-1),
            success=self._flag(info, "success"),
            fail=self._flag(info, "fail"),
            proprio=self._proprio(qpos, tcp),
            privileged=self._privileged(info, qpos, tcp),
        )

    def object_position(self) -> Tensor | None:
        """Returns the position of the first movable object, float32 [B, 3] in metres, None if the task has none."""
        return self.objects[0].pose.p.clone() if self.objects else None

    def _flag(self, info: Mapping[str, object], name: str) -> Tensor:
        if name not in info:
            return torch.zeros(self.env.num_envs, dtype=torch.bool, device=self.env.device)
        return torch.as_tensor(info[name], device=self.env.device).bool().reshape(-1)

    def _proprio(self, qpos: list[Tensor], tcp: list[Tensor]) -> Tensor:
        """Returns joints, tool poses, the goal and its offset from each tool; optionally the same of each object.

        The offset is redundant, but without it a policy sometimes learns to ignore a coordinate of the goal.
        """
        goal = torch.zeros(self.env.num_envs, 3, device=self.env.device) if self.goal is None else self.goal.pose.p
        positions = [goal, *(goal - tool[:, :3] for tool in tcp)]
        if not self._goal_in_proprio or self.goal is None:
            positions = [torch.zeros_like(part) for part in positions]
        for place in [body.pose.p for body in self.objects] if self._objects_in_proprio else []:
            positions += [place, *(place - tool[:, :3] for tool in tcp)]
        return torch.cat([*qpos, *tcp, *positions], 1)

    def _privileged(self, info: Mapping[str, object], qpos: list[Tensor], tcp: list[Tensor]) -> Tensor:
        poses = [body.pose.raw_pose for body in [*self.objects, *self.mechanisms]]
        parts = [*qpos, *(agent.robot.get_qvel() for agent in self.agents), *tcp, *poses]
        parts += [mechanism.get_qpos() for mechanism in self.mechanisms]
        parts += [(pose[:, :3] - tool[:, :3]) * OFFSET_SCALE for pose in poses for tool in tcp]
        if self.goal is not None:
            goal = self.goal.pose.p
            parts += [goal, *((goal - pose[:, :3]) * OFFSET_SCALE for pose in poses)]
        if self._grasp_keys is None:
            self._grasp_keys = sorted(key for key in info if "grasp" in key and isinstance(info[key], Tensor))
        parts += [info[key].float().reshape(-1, 1) for key in self._grasp_keys]
        return torch.cat(parts, 1)


NUM_ACTIONS = 7
TURN_RAD = 0.1  # radians at action 1
STEP_M = 0.1  # metres of target offset at action 1
CLEAR_RAD = 0.8  # minimum angle between the line of the fingers and a neighbour ...
NEAR_M = 0.09  # ... that is nearer than this
GAIN = 0.8  # share of the remaining distance per control step; a larger one overshoots
OPEN, CLOSED = 1.0, -1.0

Expert = Callable[[TaskView], Tensor]


def expert_of(task_id: str, view: TaskView) -> Expert | None:
    """Returns the scripted expert of a task, None if it, its robot or its control mode has none."""
    agent = view.agents[0]
    supported = agent.control_mode == CONTROL_MODE and hasattr(agent, "is_grasping") and hasattr(agent, "tcp")
    arm_only = view.env.single_action_space.shape == (NUM_ACTIONS,)  # a mobile robot also has a body and wheels
    return EXPERTS.get(task_id) if supported and arm_only else None


def _actions(move: Tensor, gripper: Tensor, turn: Tensor | None = None) -> Tensor:
    """Returns actions [B, 7] from offsets [B, 3] (metres), gripper commands [B, 1] and turns about z [B] (radians)."""
    rotation = torch.zeros_like(move)
    if turn is not None:
        rotation[:, 2] = (-turn / TURN_RAD).clamp(-1, 1)  # ManiSkill scales rotations by the negative bound
    return torch.cat([(move / STEP_M * GAIN).clamp(-1, 1), rotation, gripper], 1)


def _approach(offset: Tensor, height: float, tolerance: float) -> Tensor:
    """Returns the offset [B, 3] to move by: to `height` above the target, or to it once within `tolerance` sideways."""
    hover = offset + torch.tensor([0.0, 0.0, height], device=offset.device)
    return torch.where(offset[:, :2].norm(dim=1, keepdim=True) < tolerance, offset, hover)


def _reached(offset: Tensor, tolerance: float, height: float) -> Tensor:
    """Returns whether an offset [B, 3] is within `tolerance` sideways and `height` vertically, as [B, 1]."""
    return (offset[:, :2].norm(dim=1, keepdim=True) < tolerance) & (offset[:, 2:].abs() < height)


def pick_cube(view: TaskView) -> Tensor:
    """Grasps the cube from above and carries it to the goal; actions [B, 7]."""
    task = view.env
    tcp, cube, goal = task.agent.tcp_pose.p, task.cube.pose.p, task.goal_site.pose.p
    offset = cube - tcp
    grasped = task.agent.is_grasping(task.cube)[:, None]
    move = torch.where(grasped, goal - cube, _approach(offset, height=0.08, tolerance=0.012))
    gripper = torch.where(grasped | _reached(offset, tolerance=0.012, height=0.008), CLOSED, OPEN)
    return _actions(move, gripper)


def shove_cube(view: TaskView, direction: float) -> Tensor:
    """Goes down on the near side of the cube, fingers closed, and shoves it along x; actions [B, 7].

    `direction` is 1 away from the robot, -1 towards it.
    """
    task = view.env
    tcp, cube, goal = task.agent.tcp_pose.p, task.obj.pose.p, task.goal_region.pose.p
    offset = cube - tcp
    start = offset - torch.tensor([direction * 0.055, 0.0, 0.0], device=offset.device)
    behind = (offset[:, :1] * direction > 0.02) & (offset[:, 1:2].abs() < 0.015) & (offset[:, 2:].abs() < 0.015)
    shove = torch.cat([goal[:, :1] - cube[:, :1] + direction * 0.02, offset[:, 1:]], 1)
    move = torch.where(behind, shove, _approach(start, height=0.08, tolerance=0.015))
    return _actions(move, torch.full_like(move[:, :1], CLOSED))


def stack_cube(view: TaskView) -> Tensor:
    """Grasps the red cube, carries it over the green one, sets it down and lets go; actions [B, 7]."""
    task = view.env
    tcp, red, green = task.agent.tcp_pose.p, task.cubeA.pose.p, task.cubeB.pose.p
    up = torch.tensor([0.0, 0.0, 1.0], device=tcp.device)
    offset, carry = red - tcp, green + 0.04 * up - red
    grasped = task.agent.is_grasping(task.cubeA)[:, None]
    placed = (carry[:, :2].norm(dim=1, keepdim=True) < 0.01) & (carry[:, 2:].abs() < 0.006)
    over = _approach(carry, height=0.03, tolerance=0.015)
    low = red[:, 2:] < green[:, 2:] + 0.045  # rise before going sideways, or the cubes touch
    over = torch.where(low & (carry[:, :2].norm(dim=1, keepdim=True) > 0.01), over * up, over)
    turn = _clearing_turn(task.agent.tcp_pose.q, green - red)
    turned = turn.abs()[:, None] < 0.1
    reach = torch.where(turned, _approach(offset, height=0.08, tolerance=0.012), offset + 0.06 * up)
    move = torch.where(grasped, over, reach)
    move = torch.where(placed, torch.where(grasped, torch.zeros_like(offset), 0.05 * up), move)
    at_cube = _reached(offset, tolerance=0.012, height=0.008)
    gripper = torch.where((grasped | at_cube) & ~placed, CLOSED, OPEN)
    return _actions(move, gripper, torch.where((grasped | placed)[:, 0], 0.0, turn))


def _clearing_turn(tool_q: Tensor, neighbour: Tensor) -> Tensor:
    """Returns the turn about z [B] in radians that keeps the open fingers clear of a cube's neighbour.

    Turns are slow (the arm follows 0.04 rad per step), so it is no larger than needed.

    Args:
        tool_q: quaternions of the tool [B, 4]; its y axis is the one along which the fingers close.
        neighbour: offset from the cube to the other one [B, 3] in metres.
    """
    across = quaternion_to_matrix(tool_q)[:, :2, 1]
    angle = torch.atan2(across[:, 1], across[:, 0]) - torch.atan2(neighbour[:, 1], neighbour[:, 0])
    angle = torch.remainder(angle + torch.pi / 2, torch.pi) - torch.pi / 2  # from the neighbour's direction, a line
    missing = (CLEAR_RAD - angle.abs()).clamp(min=0.0)
    near = neighbour[:, :2].norm(dim=1) < NEAR_M
    return torch.where(near, torch.where(angle < 0, -missing, missing), 0.0)


EXPERTS: dict[str, Expert] = {
    "PickCube-v1": pick_cube,
    "PushCube-v1": partial(shove_cube, direction=1.0),
    "PullCube-v1": partial(shove_cube, direction=-1.0),
    "StackCube-v1": stack_cube,
}
