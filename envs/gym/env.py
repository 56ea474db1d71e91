"""Gymnasium's envs: env=gymnasium env.id=HalfCheetah-v5 (docs/gymnasium.md)."""

from __future__ import annotations

from envs.episodes import EpisodeEnv
from envs.foreign.env import ForeignSimulator, start_processes
from envs.foreign.process import Local
from envs.foreign.worker import Rows
from envs.gym.row import Gymnasium, GymnasiumOptions
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.interfaces.options import typed


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of a Gymnasium id; arguments as envs.maniskill.make_env, tensors are on the CPU.

    Rows run in this process, or in processes of env.options.python.

    Raises:
        ConfigError: an unknown option or camera.
        SimulatorError: the id cannot be made or used, env.options.python is missing, or env.carry_over is true and
            episodes cannot be replayed.
    """
    adapter = Gymnasium(config.task, read_options(config))
    if adapter.options.python:
        simulator = start_processes(config, adapter, num_envs, device)
    else:
        facts = adapter.open(config.cameras, config.obs_size)
        links = [Local(Rows(adapter, config.cameras, config.obs_size))]
        simulator = ForeignSimulator(config, adapter, facts, [range(num_envs)], links)
    if config.carry_over and not simulator.history_free:
        raise SimulatorError(
            f"env.carry_over is true, so a checkpoint replays the running episodes, but {config.task} is not known to "
            "have episodes that are functions of seed and actions: if they are, set env.options.history_free=true; "
            "otherwise env.carry_over=false and env.chunks_per_rollout of an episode's length or more"
        )
    return EpisodeEnv(config, simulator, lambda: simulator.tasks, render_final)


def read_options(config: EnvConfig) -> GymnasiumOptions:
    """Returns the options of a config; raises ConfigError for an unknown option, a bad value or an unknown camera."""
    options = typed(config.options, GymnasiumOptions, "env.options")
    rule = "a Gymnasium env has one camera, the image of its observation or of `render`, which may have any name"
    action = "use env.cameras=[rgb_array], or [] for its state only"
    fits = len(config.cameras) <= 1 and Gymnasium.film_camera not in config.cameras
    require(fits, "env.cameras", list(config.cameras), rule, action)
    return options
