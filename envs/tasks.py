"""What the project reads from a ManiSkill task: instruction, proprioception, privileged state, reward and success."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Actor, Articulation
from torch import Tensor

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
    """Returns what to do, in words: the task's own sentence, or its name ("PlugCharger-v1" -> "plug charger")."""
    name = re.sub(r"-v\d+$", "", task_id)
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-_]+", " ", name).lower()
    return INSTRUCTIONS.get(task_id, " ".join(spaced.split()))


class TaskView:
    """Reads one ManiSkill env object of B rows; every row is computed by itself, so that B does not change its bits."""

    def __init__(self, env: BaseEnv, goal_in_proprio: bool, objects_in_proprio: bool = False) -> None:
        """Finds the robots, the goal and the objects of the task, which stay the same for the life of `env`."""
        self.env, self._goal_in_proprio = env, goal_in_proprio
        self._objects_in_proprio = objects_in_proprio
        self.agents = env.agent.agents if isinstance(env.agent, MultiAgent) else [env.agent]
        actors = _moving_actors(env)
        self.goal = next((actor for name, actor in actors.items() if "goal" in name.lower()), None)
        self.objects = [actor for actor in actors.values() if actor is not self.goal]
        robots = {id(agent.robot) for agent in self.agents}
        self.mechanisms = [a for a in _articulations(env) if id(a) not in robots]
        self._grasp_keys: list[str] | None = None

    def measure(self, actions: Tensor) -> Measurement:
        """Evaluates the current state once; `actions` [B, A] led to it (a few rewards depend on them)."""
        info = self.env.get_info()
        reward = torch.as_tensor(self.env.get_reward(obs={}, action=actions, info=info), dtype=torch.float32)
        tcp = self._tool_poses()
        qpos = [agent.robot.get_qpos() for agent in self.agents]
        return Measurement(
            reward=reward.reshape(-1),
            success=self._flag(info, "success"),
            fail=self._flag(info, "fail"),
            proprio=self._proprio(qpos, tcp),
            privileged=self._privileged(info, qpos, tcp),
        )

    def object_position(self) -> Tensor | None:
        """Returns where the first movable object is, float32 [B, 3] in metres, None for a task without one."""
        return self.objects[0].pose.p.clone() if self.objects else None

    def _flag(self, info: Mapping[str, object], name: str) -> Tensor:
        if name not in info:
            return torch.zeros(self.env.num_envs, dtype=torch.bool, device=self.env.device)
        return torch.as_tensor(info[name], device=self.env.device).bool().reshape(-1)

    def _tool_poses(self) -> list[Tensor]:
        """Position and quaternion of each robot's tool; a robot without one (a cart-pole) shows zeros."""
        zeros = torch.zeros(self.env.num_envs, 7, device=self.env.device)
        tools = [getattr(agent, "tcp", None) for agent in self.agents]
        return [zeros if tool is None else tool.pose.raw_pose for tool in tools]

    def _goal_position(self) -> Tensor:
        if self.goal is None:
            return torch.zeros(self.env.num_envs, 3, device=self.env.device)
        return self.goal.pose.p

    def _proprio(self, qpos: list[Tensor], tcp: list[Tensor]) -> Tensor:
        """Returns joints, tool poses, the goal, and the way from each tool to it; on demand the same of each object.

        The way is the difference of what stands before it; a policy that has to find it by itself now and then learns
        to ignore one of the goal's coordinates.
        """
        goal = self._goal_position()
        shown = [goal, *(goal - tool[:, :3] for tool in tcp)]
        if not self._goal_in_proprio or self.goal is None:
            shown = [torch.zeros_like(part) for part in shown]
        for place in [body.pose.p for body in self.objects] if self._objects_in_proprio else []:
            shown += [place, *(place - tool[:, :3] for tool in tcp)]
        return torch.cat([*qpos, *tcp, *shown], 1)

    def _privileged(self, info: Mapping[str, object], qpos: list[Tensor], tcp: list[Tensor]) -> Tensor:
        poses = [body.pose.raw_pose for body in [*self.objects, *self.mechanisms]]
        parts = [*qpos, *(agent.robot.get_qvel() for agent in self.agents), *tcp, *poses]
        parts += [mechanism.get_qpos() for mechanism in self.mechanisms]
        parts += [(pose[:, :3] - tool[:, :3]) * OFFSET_SCALE for pose in poses for tool in tcp]
        if self.goal is not None:
            goal = self._goal_position()
            parts += [goal, *((goal - pose[:, :3]) * OFFSET_SCALE for pose in poses)]
        if self._grasp_keys is None:
            self._grasp_keys = sorted(key for key in info if "grasp" in key and isinstance(info[key], Tensor))
        parts += [info[key].float().reshape(-1, 1) for key in self._grasp_keys]
        return torch.cat(parts, 1)


def _moving_actors(env: BaseEnv) -> dict[str, Actor]:
    """Actors with one body per row that are neither scenery nor static, by name."""
    actors = {**env.scene.actors, **env.scene.actor_views}
    return {
        name: actor
        for name, actor in actors.items()
        if actor.px_body_type != "static" and len(actor._objs) == env.num_envs and "table" not in name.lower()
    }


def _articulations(env: BaseEnv) -> list[Articulation]:
    found = [*env.scene.articulations.values(), *env.scene.articulation_views.values()]
    return [articulation for articulation in found if len(articulation._objs) == env.num_envs]
