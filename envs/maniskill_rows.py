"""Which simulator runs the rows of a ManiSkill task, and with which arguments of the task class."""

from __future__ import annotations

from dataclasses import replace

import mani_skill.envs  # noqa: F401  registers the tasks
import torch
from mani_skill.agents.registration import REGISTERED_AGENTS
from mani_skill.utils.registration import REGISTERED_ENVS
from mani_skill.utils.sapien_utils import look_at

from envs.batched.build import known_difference
from envs.gpu_library import enable_gpu_physics
from envs.gpu_simulator import GpuSimulator
from envs.maniskill import ManiskillOptions
from envs.simulator import Simulator
from envs.simulators import BatchedSimulator, StockSimulator
from envs.stock import (
    BUILD_ERRORS,
    build_task,
    check_assets,
    check_name,
    check_renderer,
    explained,
    is_wrong_mode,
    no_questions,
    overrides,
    runs_physx,
    warn_of_fallback,
)
from envs.tasks import instruction_of
from rlinf_embodied.config import Backend, EnvConfig, Reward
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.portable.exact_reciprocals import make_reciprocals_exact


def make_rows(config: EnvConfig, options: ManiskillOptions, num_envs: int, device: str) -> tuple[Simulator, str]:
    """Returns the simulator of `num_envs` rows and the task's instruction; arguments and errors as `make_env`."""
    check_name("env.task", config.task, REGISTERED_ENVS)
    if options.robot is not None:
        check_name("env.options.robot", options.robot, REGISTERED_AGENTS)
    check_assets("env.task", config.task)
    check_renderer(device)
    if config.reward is not Reward.sparse and not _has_dense_reward(config.task):
        raise ConfigError(
            f"env.reward is {config.reward.value}, but {config.task} has no dense reward: use env.reward=sparse"
        )
    make_reciprocals_exact()
    with no_questions():
        simulator = _make_simulator(config, options, num_envs, device)
    return simulator, config.instruction or instruction_of(config.task)


def _has_dense_reward(task_id: str) -> bool:
    """Returns whether the task defines a normalized dense reward."""
    cls = REGISTERED_ENVS[task_id].cls
    return (
        overrides(cls, "compute_dense_reward", "compute_normalized_dense_reward")
        and "normalized_dense" in cls.SUPPORTED_REWARD_MODES
    )


def reward_mode(task_id: str) -> str:
    """Returns how ManiSkill computes the task's own reward: the best of normalized_dense, sparse, none (always 0)."""
    supported = REGISTERED_ENVS[task_id].cls.SUPPORTED_REWARD_MODES
    if _has_dense_reward(task_id):
        return "normalized_dense"
    return "sparse" if "sparse" in supported else "none"


def _make_simulator(config: EnvConfig, options: ManiskillOptions, num_envs: int, device: str) -> Simulator:
    backend = config.backend
    if backend is Backend.auto:
        backend = Backend.gpu if runs_physx(device) else Backend.batched
    elif backend is Backend.cpu:
        backend = Backend.batched
    if options.decimate is None:
        options = replace(options, decimate=backend is not Backend.gpu)
    kwargs = _task_kwargs(config, options)
    attempt = (
        f"env.task={config.task} cannot be built with env.options.robot={options.robot}, env.options.control_mode="
        f"{options.control_mode}, env.cameras={list(config.cameras)}"
    )
    with explained("env.options.control_mode", attempt):
        if backend is Backend.gpu:
            return _make_gpu(config, num_envs, device, options, kwargs)
        if backend is Backend.batched and (simulator := _try_batched(config, num_envs, options, kwargs)):
            return simulator
        return StockSimulator(config.task, num_envs, config.cameras, options, kwargs)


def _try_batched(
    config: EnvConfig, num_envs: int, options: ManiskillOptions, kwargs: dict[str, object]
) -> BatchedSimulator | None:
    """Returns the batched simulator, None (and the reason in the log) if this task cannot be batched."""
    try:
        known = known_difference(config.task, **kwargs)
        if known or (known is None and config.backend is not Backend.batched):
            unknown = "it was not compared with stock ManiSkill; env.backend=batched runs it nevertheless"
            raise SimulatorError(f"{known}: use env.backend=stock" if known else unknown)
        simulator = BatchedSimulator(config.task, num_envs, config.cameras, options, kwargs)
        simulator.reset([num_envs - 1], [0])
        simulator.step(torch.zeros(num_envs, simulator.action_dim), [num_envs - 1])
        return simulator
    except (SimulatorError, *BUILD_ERRORS) as error:
        if is_wrong_mode(error) or (isinstance(error, SimulatorError) and config.backend is Backend.batched):
            raise
        warn_of_fallback(config.task, f"{type(error).__name__}: {error}")
        return None


def _make_gpu(
    config: EnvConfig, num_envs: int, device: str, options: ManiskillOptions, kwargs: dict[str, object]
) -> GpuSimulator:
    if not runs_physx(device):
        raise SimulatorError(
            f"env.backend=gpu needs a CUDA device, but the simulator runs on {device}: use env.backend=batched"
        )
    if options.decimate:
        raise ConfigError(
            "env.options.decimate is true, but on a GPU images show a task's own meshes: leave it out, or use "
            "env.backend=batched"
        )
    enable_gpu_physics()
    index = device.partition(":")[2] or "0"
    backends = {"sim_backend": f"physx_cuda:{index}", "render_backend": f"sapien_cuda:{index}"}
    task = build_task(config.task, num_envs=num_envs, **backends, **kwargs)
    return GpuSimulator(config.task, task, config.cameras, options)


def _task_kwargs(config: EnvConfig, options: ManiskillOptions) -> dict[str, object]:
    """Returns the arguments of the task class."""
    sensors: dict[str, object] = {"width": config.obs_size, "height": config.obs_size}
    first: dict[str, object] = {} if options.camera_fov is None else {"fov": options.camera_fov}
    if options.camera_eye is not None and options.camera_target is not None:
        first["pose"] = look_at(options.camera_eye, options.camera_target)
    if first and config.cameras:
        sensors[config.cameras[0]] = first
    kwargs: dict[str, object] = {
        "control_mode": options.control_mode,
        "reward_mode": reward_mode(config.task),
        "sensor_configs": sensors,
    }
    if options.robot is not None:
        kwargs["robot_uids"] = options.robot
    return kwargs
