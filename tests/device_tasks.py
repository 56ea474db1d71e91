"""Rows of a ManiSkill task on the GPU simulator with a stand-in for PhysX (simulated_physx), on any device."""

from __future__ import annotations

from simulated_physx import gpu_task

from envs.episodes import EpisodeEnv
from envs.gpu_simulator import GpuSimulator
from envs.maniskill import read_options
from envs.tasks import instruction_of
from rlinf_embodied.config import EnvConfig


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns rows of a ManiSkill task as envs.maniskill.make_env does with env.options.backend=gpu."""
    options = read_options(config)
    task = gpu_task(
        config.task,
        num_envs,
        device,
        control_mode=options.control_mode,
        reward_mode="normalized_dense",
        robot_uids=options.robot or "panda_wristcam",
        sensor_configs={"width": config.obs_size, "height": config.obs_size},
    )
    simulator = GpuSimulator(config, task, options)
    return EpisodeEnv(config, simulator, instruction_of(config.task), render_final)
