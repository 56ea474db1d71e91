"""LIBERO's suites as envs: env=libero_spatial, libero_object, libero_goal, libero_10 and libero_90 (docs/libero.md)."""

from __future__ import annotations

from envs.episodes import EpisodeEnv
from envs.libero.options import PLACE, read_options
from envs.libero.simulator import LiberoSimulator
from rlinf_embodied.config import EnvConfig

WORKER = ("-P", "-m", "envs.libero.worker")


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of a suite; arguments as envs.maniskill.make_env.

    Raises:
        ConfigError: an unknown suite or option, or a reward, camera or control mode that LIBERO does not have.
        SimulatorError: LIBERO's own environment is missing or broken.
    """
    options = read_options(config)
    command = (str(PLACE.python()), *WORKER)
    simulator = LiberoSimulator(config, options, num_envs, command, device)
    return EpisodeEnv(config, simulator, lambda: simulator.tasks, render_final)
