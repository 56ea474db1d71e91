"""The controllers of a task's robots, and whether anything but physics happens between its simulation steps."""

from __future__ import annotations

from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController, DictController
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Pose
from torch import Tensor

_HOOKS = ("_before_simulation_step", "_after_simulation_step", "_step_action")
_PLAIN = (BaseController.before_simulation_step, PDJointPosController.before_simulation_step)


def controllers_of(agent: BaseAgent | None) -> list[BaseController]:
    """Returns the active controller of each robot."""
    if agent is None:
        return []
    return list(agent.controller.values()) if isinstance(agent.controller, dict) else [agent.controller]


def has_bare_steps(task_class: type[BaseEnv], agent: BaseAgent | None) -> bool:
    """Whether the simulation steps of a control step follow each other without code of task, robot or controller."""
    if any(getattr(task_class, name) is not getattr(BaseEnv, name) for name in _HOOKS) or agent is None:
        return False
    if getattr(type(agent), "before_simulation_step", None) is not BaseAgent.before_simulation_step:
        return False
    return all(
        type(leaf).before_simulation_step in _PLAIN and not getattr(leaf.config, "interpolate", False)
        for leaf in leaf_controllers(agent)
    )


def leaf_controllers(agent: BaseAgent | None) -> list[BaseController]:
    """Returns the controllers that the active ones are made of."""
    return [leaf for controller in controllers_of(agent) for leaf in _leaves(controller)]


def copy_targets(source: BaseAgent | None, row: int, num_rows: int, target: BaseAgent | None) -> None:
    """Gives the controllers of a single env what those of a row keep between steps: their targets."""
    for ours, theirs in zip(leaf_controllers(source), leaf_controllers(target), strict=True):
        for name, value in ours.__dict__.items():
            values = value.raw_pose if isinstance(value, Pose) else value
            if not isinstance(values, Tensor) or values.shape[:1] != (num_rows,):
                continue
            present = theirs.__dict__.get(name)
            shape = (
                tuple((present.raw_pose if isinstance(present, Pose) else present).shape) if present is not None else ()
            )
            if present is None or shape == (1, *values.shape[1:]):
                entry = values[row : row + 1].clone()
                theirs.__dict__[name] = Pose.create(entry) if isinstance(value, Pose) else entry


def _leaves(controller: BaseController) -> list[BaseController]:
    if isinstance(controller, DictController):
        return [leaf for part in controller.controllers.values() for leaf in _leaves(part)]
    return [controller]
