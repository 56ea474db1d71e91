"""Stock ManiSkill env objects, functions shared with the batched ones, and checks of assets and renderer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache

import gymnasium as gym
import mani_skill.envs  # registers the tasks
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.observations import parse_obs_mode_to_struct
from mani_skill.utils import assets, download_asset
from mani_skill.utils.registration import REGISTERED_ENVS
from torch import Tensor

from envs.batched.rendering import open_renderer
from envs.batched.scene_recreation import packed_state, put_back, recreated_scene
from rlinf_embodied.config.checks import did_you_mean, require
from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import ConfigError, SimulatorError


@cache
def freeze_imports() -> None:
    """Exempts what has been imported from garbage collection, which ManiSkill runs in every build: 0.2 s each."""
    gc.freeze()


def overrides(task_class: type[BaseEnv], *names: str) -> bool:
    """Returns whether a task overrides any of these attributes of BaseEnv."""
    return any(getattr(task_class, name) is not getattr(BaseEnv, name) for name in names)


def build_task(task_id: str, **kwargs: object) -> BaseEnv:
    """Returns a stock ManiSkill env object without wrappers; `kwargs` go to the task class."""
    spec = REGISTERED_ENVS[task_id]
    fixed = {"obs_mode": "none", "render_backend": "cpu", "reconfiguration_freq": 0}
    task = spec.cls(**{**(spec.default_kwargs or {}), **fixed, **kwargs})
    if not task.gpu_sim_enabled:
        task._built_state = packed_state(task.scene.px)  # for `recreate_scene`
    return task


def action_dim(task: BaseEnv) -> int:
    """Returns the number of action components of all robots together."""
    space = task.single_action_space
    parts = space.values() if isinstance(space, gym.spaces.Dict) else [space]
    return sum(part.shape[0] for part in parts)


def task_actions(task: BaseEnv, actions: Tensor) -> Tensor | dict[str, Tensor]:
    """Returns actions [N, A] in the task's form: a dict by robot if there are several robots."""
    space = task.single_action_space
    if not isinstance(space, gym.spaces.Dict):
        return actions
    sizes = [part.shape[0] for part in space.values()]
    return dict(zip(space, actions.split(sizes, 1), strict=True))


def colour_images(task: BaseEnv) -> dict[str, Tensor]:
    """Returns each camera's image, uint8 [N, height, width, 3], in any observation mode of the task."""
    before = task._obs_mode, task.obs_mode_struct
    task._obs_mode, task.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
    try:
        return {name: images["rgb"] for name, images in task._get_obs_sensor_data().items() if "rgb" in images}
    finally:
        task._obs_mode, task.obs_mode_struct = before


def recreate_scene(task: BaseEnv) -> None:
    """Replaces the PhysX system of a stock CPU task of `build_task` by a new one without its history."""
    scene = recreated_scene(task.scene.sub_scenes[0], task.scene.can_render())
    task.scene.sub_scenes[0], task.scene.px = scene, scene.physx_system
    put_back(scene.physx_system, task._built_state)


logger = logging.getLogger(__name__)

# Raised by ManiSkill and SAPIEN for tasks that cannot be built, or not by the batched backend.
BUILD_ERRORS = (RuntimeError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError, OSError)
BUILD_ERRORS += (ImportError,)
WRONG_MODE = "not in supported modes"  # in the error for a control mode that the robot lacks


@contextmanager
def explained(mode_path: str, attempt: str) -> Iterator[None]:
    """Raises ManiSkill's errors within the block as ConfigError (unknown control mode) or SimulatorError (all others).

    Args:
        mode_path: the config path of the control mode.
        attempt: the task and its arguments, as "... cannot be built with ...".
    """
    try:
        yield
    except BUILD_ERRORS as error:
        if WRONG_MODE in str(error):
            raise ConfigError(f"{mode_path} is {error}: use one of these") from error
        raise SimulatorError(f"{attempt} ({type(error).__name__}: {error}): check these against the task") from error


@cache
def warn_of_fallback(task_id: str, reason: str) -> None:
    """Logs once per process and reason why stock envs are used."""
    logger.warning(
        "%s does not run on the batched CPU backend (%s): one stock env object per row is used, which is slower",
        task_id,
        reason,
    )


def check_name(path: str, value: str, known: Collection[str]) -> None:
    """Raises ConfigError, with a suggestion, if a value of the config path `path` is not among the known names."""
    suggestion = did_you_mean(value, list(known)).strip() or f"use one of {', '.join(sorted(known)[:10])}, ..."
    require(value in known, path, value, "ManiSkill knows no such name", suggestion)


def check_assets(path: str, task_id: str) -> None:
    """Raises SimulatorError, with the command to download them, if assets of a task are not on this machine."""
    needed = REGISTERED_ENVS[task_id].asset_download_ids or []
    members = assets.expand_data_group_into_individual_data_source_ids
    sources = [source for name in needed for source in (members(name) if name in assets.DATA_GROUPS else [name])]
    missing = [source for source in sources if not assets.is_data_source_downloaded(source)]
    if missing:
        raise SimulatorError(
            f"{path}={task_id} needs assets that are not on this machine ({', '.join(missing[:3])}): run "
            f"`python -m mani_skill.utils.download_asset {task_id}`, or use a task whose assets ship with ManiSkill, "
            "for example PickCube-v1"
        )


def check_renderer(device: str) -> None:
    """Raises SimulatorError, with the commands to install one, if no Vulkan device can render for this device."""
    try:
        open_renderer("cuda" if kind_of(device) == "cuda" else "cpu")
    except RuntimeError as error:
        raise SimulatorError(
            f"no Vulkan device can render for device={device} ({error}): run `make setup`, or on Debian 12 as root "
            "`apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1` (Ubuntu 24.04: its own packages)"
        ) from error


@contextmanager
def no_questions() -> Iterator[None]:
    """Within the block, ManiSkill raises an error instead of asking on the terminal whether to download a robot.

    It also suppresses the warning that a task lists panda but not panda_wristcam, the same robot with a camera.
    """
    is_other = lambda record: "panda_wristcam is not in the task's list" not in record.getMessage()  # noqa: E731

    def refuse(message: str) -> bool:
        raise FileNotFoundError(f"{message.strip()} This is done by `python -m mani_skill.utils.download_asset <name>`")

    stock, download_asset.prompt_yes_no = download_asset.prompt_yes_no, refuse
    mani_skill.logger.addFilter(is_other)
    try:
        yield
    finally:
        mani_skill.logger.removeFilter(is_other)
        download_asset.prompt_yes_no = stock
