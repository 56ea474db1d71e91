"""MetaWorld's tasks as envs: env=metaworld env.task=<task>, env=metaworld_mt10 (docs/metaworld.md)."""

from __future__ import annotations

from envs.episodes import EpisodeEnv
from envs.metaworld.options import PLACE, read_options
from envs.metaworld.simulator import MetaworldSimulator
from rlinf_embodied.config import EnvConfig

WORKER = ("-P", "-m", "envs.metaworld.worker")

__all__ = ["make_env", "read_options"]


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of a task or suite; arguments as envs.maniskill.make_env.

    Raises:
        ConfigError: an unknown task or option, or a camera, control mode or horizon that MetaWorld does not have.
        SimulatorError: MetaWorld's own environment is missing or broken.
    """
    options = read_options(config)
    simulator = MetaworldSimulator(config, options, num_envs, (str(PLACE.python()), *WORKER), device)
    return EpisodeEnv(config, simulator, lambda: simulator.tasks, render_final)
