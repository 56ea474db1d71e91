"""Gymnasium's envs: env=gymnasium env.id=HalfCheetah-v5 (docs/gymnasium.md)."""

from __future__ import annotations

from envs.episodes import EpisodeEnv
from envs.gym.foreign import ForeignGymnasium
from envs.gym.options import read_options
from envs.gym.simulator import GymnasiumSimulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import SimulatorError


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of a Gymnasium id; arguments as envs.maniskill.make_env, tensors are on the CPU.

    Raises:
        ConfigError: an unknown option or camera.
        SimulatorError: the id cannot be made or used, env.options.python is missing, or its episodes are to be
            carried over and cannot be replayed.
    """
    options = read_options(config)
    if options.python:
        simulator = ForeignGymnasium(config, options, num_envs, device)
    else:
        simulator = GymnasiumSimulator(config, options, num_envs)
    if config.carry_over and not simulator.history_free:
        raise SimulatorError(
            f"env.carry_over is true, and a checkpoint replays the episodes that are under way, but nobody promises "
            f"that seed and actions decide an episode of {config.task}: if they do, set env.options.history_free=true; "
            "else env.carry_over=false and env.chunks_per_rollout of an episode's length or more"
        )
    return EpisodeEnv(config, simulator, config.instruction or config.task, render_final)
