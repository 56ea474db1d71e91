"""Chooses the simulator of a ManiSkill task's rows, and the arguments of the task class."""

from __future__ import annotations

import zipfile
from pathlib import Path

import mani_skill.envs  # noqa: F401  registers the tasks
import torch
from mani_skill.agents.registration import REGISTERED_AGENTS
from mani_skill.utils.registration import REGISTERED_ENVS
from sapien import physx

from envs.batched.build import known_difference
from envs.gpu_simulator import GpuSimulator
from envs.maniskill import Backend, ManiskillOptions
from envs.simulator import Simulator
from envs.simulators import BatchedSimulator, StockSimulator
from envs.stock import (
    BUILD_ERRORS,
    WRONG_MODE,
    build_task,
    check_assets,
    check_name,
    check_renderer,
    explained,
    freeze_imports,
    no_questions,
    overrides,
    warn_of_fallback,
)
from envs.tasks import instruction_of
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.portable.exact_reciprocals import make_reciprocals_exact


def make_rows(config: EnvConfig, options: ManiskillOptions, num_envs: int, device: str) -> tuple[Simulator, str]:
    """Returns the simulator of `num_envs` rows and the task's instruction; arguments and errors as `make_env`."""
    freeze_imports()
    check_name("env.task", config.task, REGISTERED_ENVS)
    if options.robot is not None:
        check_name("env.options.robot", options.robot, REGISTERED_AGENTS)
    check_assets("env.task", config.task)
    check_renderer(device)
    if config.reward is not Reward.sparse and reward_mode(config.task) != "normalized_dense":
        raise ConfigError(
            f"env.reward is {config.reward.value}, but {config.task} has no dense reward: use env.reward=sparse"
        )
    make_reciprocals_exact()
    with no_questions():
        simulator = _make_simulator(config, options, num_envs, device)
    return simulator, config.instruction or instruction_of(config.task)


def reward_mode(task_id: str) -> str:
    """Returns the first reward mode that the task supports: normalized_dense, sparse, or none (always 0)."""
    cls = REGISTERED_ENVS[task_id].cls
    is_dense = overrides(cls, "compute_dense_reward", "compute_normalized_dense_reward")
    modes = [mode for mode in ("normalized_dense", "sparse") if mode in cls.SUPPORTED_REWARD_MODES]
    return next((mode for mode in modes if is_dense or mode == "sparse"), "none")


def _make_simulator(config: EnvConfig, options: ManiskillOptions, num_envs: int, device: str) -> Simulator:
    backend = options.backend
    if backend is Backend.auto and kind_of(device) == "cuda":
        backend = Backend.gpu
    sensors: dict[str, object] = {"width": config.obs_size, "height": config.obs_size}
    if options.camera_fov is not None and config.cameras:
        sensors[config.cameras[0]] = {"fov": options.camera_fov}
    kwargs: dict[str, object] = {"control_mode": options.control_mode, "sensor_configs": sensors}
    kwargs |= {"reward_mode": reward_mode(config.task)}
    kwargs |= {} if options.robot is None else {"robot_uids": options.robot}
    attempt = (
        f"env.task={config.task} cannot be built with env.options.robot={options.robot}, env.options.control_mode="
        f"{options.control_mode}, env.cameras={list(config.cameras)}"
    )
    with explained("env.options.control_mode", attempt):
        if backend is Backend.gpu:
            return _make_gpu(config, num_envs, device, options, kwargs)
        if backend is not Backend.stock and (simulator := _try_batched(config, num_envs, options, kwargs)):
            return simulator
        return StockSimulator(config, num_envs, options, kwargs)


def _try_batched(
    config: EnvConfig, num_envs: int, options: ManiskillOptions, kwargs: dict[str, object]
) -> BatchedSimulator | None:
    """Returns the batched simulator, or None, logging the reason, if this task cannot be batched."""
    try:
        known = known_difference(config.task, **kwargs)
        if known or (known is None and options.backend is not Backend.batched):
            not_compared = "it was not compared with stock ManiSkill; env.options.backend=batched runs it nevertheless"
            raise SimulatorError(f"{known}: use env.options.backend=stock" if known else not_compared)
        simulator = BatchedSimulator(config, num_envs, options, kwargs)
        simulator.reset([num_envs - 1], [0])
        simulator.step(torch.zeros(num_envs, simulator.action_dim), [num_envs - 1])
        return simulator
    except (SimulatorError, *BUILD_ERRORS) as error:
        if WRONG_MODE in str(error) or (isinstance(error, SimulatorError) and options.backend is Backend.batched):
            raise
        warn_of_fallback(config.task, f"{type(error).__name__}: {error}")
        return None


def _make_gpu(
    config: EnvConfig, num_envs: int, device: str, options: ManiskillOptions, kwargs: dict[str, object]
) -> GpuSimulator:
    if kind_of(device) != "cuda":
        raise SimulatorError(
            f"env.options.backend=gpu needs a CUDA device, but the simulator runs on {device}: use "
            "env.options.backend=batched"
        )
    _enable_gpu_physics()
    index = device.partition(":")[2] or "0"
    backends = {"sim_backend": f"physx_cuda:{index}", "render_backend": f"sapien_cuda:{index}"}
    task = build_task(config.task, num_envs=num_envs, **backends, **kwargs)
    return GpuSimulator(config, task, options)


def _enable_gpu_physics() -> None:
    """Loads PhysX's GPU library, which SAPIEN downloads on first use."""
    try:
        physx.enable_gpu()
    except RuntimeError as error:
        raise SimulatorError(
            f"env.options.backend=gpu cannot use PhysX in this process ({error}): build the first env on a GPU before "
            "any that a CPU simulates, or in another process"
        ) from error
    except (OSError, zipfile.BadZipFile) as error:  # requests and the dynamic loader raise OSErrors
        raise SimulatorError(
            f"env.options.backend=gpu cannot fetch or load PhysX's library for GPUs ({type(error).__name__}: {error}): "
            f"look at the driver (nvidia-smi); without network unzip release {physx.version()} of github.com/"
            f"sapien-sim/physx-precompiled into {Path.home() / '.sapien/physx' / physx.version()}; or use "
            "env.options.backend=batched"
        ) from error
