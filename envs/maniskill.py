"""Any ManiSkill task behind the `VectorEnv` protocol.

make_env              config -> simulator -> EpisodeEnv
  episodes.EpisodeEnv   chunks, shaped reward, freezing, partial resets, replay, films
    simulators          physics and images of N rows on a CPU: batched, or stock
    gpu_simulator       one stock CUDA env with N rows (gpu_rows: rows that begin and end separately)
      tasks               what is read from a task's state, and scripted experts
"""

from __future__ import annotations

import mani_skill.envs  # noqa: F401  registers the tasks
import torch
from mani_skill.agents.registration import REGISTERED_AGENTS
from mani_skill.utils.registration import REGISTERED_ENVS
from mani_skill.utils.sapien_utils import look_at

from envs.batched.build import check_equal
from envs.episodes import EpisodeEnv
from envs.gpu_library import enable_gpu_physics
from envs.gpu_simulator import GpuSimulator
from envs.simulator import Simulator
from envs.simulators import BatchedSimulator, SimulatorOptions, StockSimulator
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
from rlinf_embodied.interfaces.options import NoOptions, typed
from rlinf_embodied.portable.exact_reciprocals import make_reciprocals_exact


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of a ManiSkill task.

    Args:
        config: the task, its cameras, rewards and backend.
        num_envs: rows N of this env object.
        device: torch's name; with backend=auto a CUDA device uses the gpu backend, any other the CPU's.
        render_final: whether final observations have images.

    Raises:
        ConfigError: unknown task, robot, camera or control mode, or a reward that the task does not have.
        SimulatorError: no usable renderer, missing assets, or a task that cannot be built.
    """
    check_name("env.task", config.task, REGISTERED_ENVS)
    if config.robot is not None:
        check_name("env.robot", config.robot, REGISTERED_AGENTS)
    typed(config.options, NoOptions, "env.options")
    check_assets("env.task", config.task)
    check_renderer(device)
    if config.reward is not Reward.sparse and not _has_dense_reward(config.task):
        raise ConfigError(
            f"env.reward is {config.reward.value}, but {config.task} has no dense reward: use env.reward=sparse"
        )
    make_reciprocals_exact()
    with no_questions():
        simulator = _make_simulator(config, num_envs, device)
    return EpisodeEnv(config, simulator, config.instruction or instruction_of(config.task), render_final)


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


def _make_simulator(config: EnvConfig, num_envs: int, device: str) -> Simulator:
    backend = config.backend
    if backend is Backend.auto:
        backend = Backend.gpu if runs_physx(device) else Backend.batched
    elif backend is Backend.cpu:
        backend = Backend.batched
    options = SimulatorOptions(
        cameras=tuple(config.cameras),
        decimate=backend is not Backend.gpu if config.decimate is None else config.decimate,
        show_goal=config.show_goal,
        goal_in_proprio=config.goal_in_proprio,
        objects_in_proprio=config.objects_in_proprio,
    )
    kwargs = _task_kwargs(config)
    attempt = (
        f"env.task={config.task} cannot be built with env.robot={config.robot}, env.control_mode="
        f"{config.control_mode}, env.cameras={list(config.cameras)}"
    )
    with explained("env.control_mode", attempt):
        if backend is Backend.gpu:
            return _make_gpu(config, num_envs, device, options, kwargs)
        if backend is Backend.batched and (simulator := _try_batched(config, num_envs, options, kwargs)):
            return simulator
        return StockSimulator(config.task, num_envs, options, kwargs)


def _try_batched(
    config: EnvConfig, num_envs: int, options: SimulatorOptions, kwargs: dict[str, object]
) -> BatchedSimulator | None:
    """Returns the batched simulator, None (and the reason in the log) if this task cannot be batched."""
    try:
        check_equal(config.task, **kwargs)
        simulator = BatchedSimulator(config.task, num_envs, options, kwargs)
        simulator.reset([num_envs - 1], [0])
        simulator.step(torch.zeros(num_envs, simulator.action_dim), [num_envs - 1])
        return simulator
    except (SimulatorError, *BUILD_ERRORS) as error:
        if is_wrong_mode(error) or (isinstance(error, SimulatorError) and config.backend is Backend.batched):
            raise
        warn_of_fallback(config.task, f"{type(error).__name__}: {error}")
        return None


def _make_gpu(
    config: EnvConfig, num_envs: int, device: str, options: SimulatorOptions, kwargs: dict[str, object]
) -> GpuSimulator:
    if not runs_physx(device):
        raise SimulatorError(
            f"env.backend=gpu needs a CUDA device, but the simulator runs on {device}: use env.backend=batched"
        )
    if options.decimate:
        raise ConfigError(
            "env.decimate is true, but on a GPU images show a task's own meshes: leave it out, or use "
            "env.backend=batched"
        )
    enable_gpu_physics()
    index = device.partition(":")[2] or "0"
    backends = {"sim_backend": f"physx_cuda:{index}", "render_backend": f"sapien_cuda:{index}"}
    task = build_task(config.task, num_envs=num_envs, **backends, **kwargs)
    return GpuSimulator(config.task, task, options)


def _task_kwargs(config: EnvConfig) -> dict[str, object]:
    """Returns the arguments of the task class."""
    sensors: dict[str, object] = {"width": config.obs_size, "height": config.obs_size}
    first: dict[str, object] = {} if config.camera_fov is None else {"fov": config.camera_fov}
    if config.camera_eye is not None and config.camera_target is not None:
        first["pose"] = look_at(config.camera_eye, config.camera_target)
    if first and config.cameras:
        sensors[config.cameras[0]] = first
    kwargs: dict[str, object] = {
        "control_mode": config.control_mode,
        "reward_mode": reward_mode(config.task),
        "sensor_configs": sensors,
    }
    if config.robot is not None:
        kwargs["robot_uids"] = config.robot
    return kwargs
