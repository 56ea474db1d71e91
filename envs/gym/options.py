"""What env.options may hold for a Gymnasium env."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from envs.gym.row import CAMERA
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.options import typed


@dataclass(kw_only=True, slots=True)
class GymnasiumOptions:
    """The defaults of env.options."""

    threads: int = 1  # that step this worker's rows; a worker has one core, and more workers are a plan's affair
    history_free: bool | None = None  # whether seed and actions decide an episode; None: of Gymnasium's own envs only
    success: bool | None = None  # whether `info` tells is_success or success; None: a look after one step tells
    python: str = ""  # of an environment that has the env's versions, from the repository on: rows run there
    processes: int = 0  # with `python`: of this worker; 0: one; on a GPU one per core
    timeout_s: int = 600  # with `python`: how long a process may take to answer
    make: dict[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make

    def __post_init__(self) -> None:
        require(self.threads >= 1, "env.options.threads", self.threads, "it must be at least 1", "use 1")
        require(self.processes >= 0, "env.options.processes", self.processes, "it is not negative", "use 0")
        require(self.timeout_s > 0, "env.options.timeout_s", self.timeout_s, "it is positive", "use 600")
        rule = "rows that run in processes of env.options.python have a thread each of these"
        require(self.threads == 1 or not self.python, "env.options.threads", self.threads, rule, "use processes")
        taken = sorted({"render_mode", "max_episode_steps", "num_envs"} & set(self.make))
        rule = "rendering follows env.cameras, the time limit is env.horizon, and the rows are env.num_envs"
        require(not taken, "env.options.make", taken, rule, "leave them out")


def read_options(config: EnvConfig) -> GymnasiumOptions:
    """Returns the options of a config.

    Raises:
        ConfigError: an unknown option, a value that cannot be used, or a camera that Gymnasium does not have.
    """
    options = typed(config.options, GymnasiumOptions, "env.options")
    if any(camera != CAMERA for camera in config.cameras) or len(config.cameras) > 1:
        raise ConfigError(
            f"env.cameras is {list(config.cameras)}, but a Gymnasium env has one, what `render` or its observation "
            f"shows: use env.cameras=[{CAMERA}], or [] for its state alone"
        )
    return options
