"""The controllers of a task's robots: changes for a batched env, and whether they act between simulation steps.

End-effector controllers solve for joint targets as on the CPU, N rows at a time; on a GPU, ManiSkill takes one step
along the Jacobian, which gives other targets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController, DictController
from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController
from mani_skill.envs.sapien_env import BaseEnv
from torch import Tensor

from envs.batched.kinematics import RowSolver
from envs.stock import overrides

_HOOKS = ("_before_simulation_step", "_after_simulation_step", "_step_action")
_row_solver = "_rlinf_embodied_row_solver"
_PLAIN = (BaseController.before_simulation_step, PDJointPosController.before_simulation_step)


def controllers_of(agent: BaseAgent | None) -> list[BaseController]:
    """Returns the active controller of each robot."""
    if agent is None:
        return []
    return list(agent.controller.values()) if isinstance(agent.controller, dict) else [agent.controller]


def has_bare_steps(task_class: type[BaseEnv], agent: BaseAgent | None) -> bool:
    """Whether the simulation steps of a control step follow each other without code of task, robot or controller."""
    if overrides(task_class, *_HOOKS) or agent is None:
        return False
    if getattr(type(agent), "before_simulation_step", None) is not BaseAgent.before_simulation_step:
        return False
    return all(
        type(leaf).before_simulation_step in _PLAIN and not getattr(leaf.config, "interpolate", False)
        for leaf in leaf_controllers(agent)
    )


def leaf_controllers(agent: BaseAgent | None) -> list[BaseController]:
    """Returns the controllers that the active ones are made of."""
    leaves, waiting = [], controllers_of(agent)
    while waiting:
        controller = waiting.pop(0)
        if isinstance(controller, DictController):
            waiting = [*controller.controllers.values(), *waiting]
        else:
            leaves.append(controller)
    return leaves


def adopt_controllers(agent: BaseAgent | None, reset: Callable[[Callable[[], None]], None]) -> None:
    """Changes the active controllers, once: end-effector control of N rows, and `reset(stock)` for a reset."""
    for controller in controllers_of(agent):
        if not isinstance(controller.reset, partial):
            controller.reset = partial(reset, controller.reset)
    for leaf in leaf_controllers(agent):
        if getattr(type(leaf), "set_action", None) is PDEEPosController.set_action:
            leaf.set_action = partial(_set_ee_action, leaf)


def _set_ee_action(controller: PDEEPosController, action: Tensor) -> None:
    """Sets drive targets from end-effector actions [N, A] as ManiSkill's CPU path does, for the active rows."""
    action = controller._preprocess_action(action)
    controller._step = 0
    controller._start_qpos = controller.qpos
    previous = controller._target_pose if controller.config.use_target else controller.ee_pose_at_base
    controller._target_pose = controller.compute_target_pose(previous, action)
    controller._target_qpos = _solve(controller)
    if controller.config.interpolate:
        controller._step_size = (controller._target_qpos - controller._start_qpos) / controller._sim_steps
    else:
        controller.set_drive_targets(controller._target_qpos)


def _solve(controller: PDEEPosController) -> Tensor:
    """Returns joint targets [N, joints] for the target poses; rows without solution or at rest keep theirs."""
    targets = controller._start_qpos.numpy().copy()
    qpos, poses = controller.articulation.get_qpos().numpy(), controller._target_pose.raw_pose.numpy()
    kinematics = controller.kinematics
    if not hasattr(kinematics, _row_solver):
        setattr(kinematics, _row_solver, RowSolver(kinematics))
    getattr(kinematics, _row_solver).solve(controller.scene.px.active, qpos, poses, targets)
    return torch.from_numpy(targets)
