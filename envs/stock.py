"""Stock ManiSkill env objects, and what they share with the batched ones."""

from __future__ import annotations

import gymnasium as gym
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.observations import parse_obs_mode_to_struct
from mani_skill.utils.registration import REGISTERED_ENVS
from torch import Tensor

from envs.batched.scene_recreation import packed_state, put_back, recreated_scene


def overrides(task_class: type[BaseEnv], *names: str) -> bool:
    """Whether a task has code of its own in place of any of these attributes of BaseEnv."""
    return any(getattr(task_class, name) is not getattr(BaseEnv, name) for name in names)


def build_task(task_id: str, **kwargs: object) -> BaseEnv:
    """Returns a stock ManiSkill env object without wrappers; `kwargs` go to the task class."""
    spec = REGISTERED_ENVS[task_id]
    fixed = {"obs_mode": "none", "render_backend": "cpu", "reconfiguration_freq": 0}
    task = spec.cls(**{**(spec.default_kwargs or {}), **fixed, **kwargs})
    if not task.gpu_sim_enabled:
        note_built(task)
    return task


def note_built(task: BaseEnv) -> None:
    """Remembers the state in which a CPU task was just built, for `recreate_scene`."""
    task._built_state = packed_state(task.scene.px)


def action_dim(task: BaseEnv) -> int:
    """Returns the number of action components of all robots together."""
    space = task.single_action_space
    parts = space.values() if isinstance(space, gym.spaces.Dict) else [space]
    return sum(part.shape[0] for part in parts)


def task_actions(task: BaseEnv, actions: Tensor) -> Tensor | dict[str, Tensor]:
    """Returns actions [N, A] as the task takes them: by robot where there are several."""
    space = task.single_action_space
    if not isinstance(space, gym.spaces.Dict):
        return actions
    sizes = [part.shape[0] for part in space.values()]
    return dict(zip(space, actions.split(sizes, 1), strict=True))


def colour_images(task: BaseEnv) -> dict[str, Tensor]:
    """Returns what each camera sees, uint8 [N, height, width, 3], whatever the task's observations are."""
    before = task._obs_mode, task.obs_mode_struct
    task._obs_mode, task.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
    try:
        return {name: seen["rgb"] for name, seen in task._get_obs_sensor_data().items() if "rgb" in seen}
    finally:
        task._obs_mode, task.obs_mode_struct = before


def recreate_scene(task: BaseEnv) -> None:
    """Gives a stock CPU task that was noted (`note_built`) a new PhysX system, without the history of the old one."""
    scene = recreated_scene(task.scene.sub_scenes[0], task.scene.can_render())
    task.scene.sub_scenes[0], task.scene.px = scene, scene.physx_system
    put_back(scene.physx_system, task._built_state)
