"""What env.options may hold for LIBERO, and where its own environment lies."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from envs.foreign.place import Place
from envs.libero.starts import NUM_TASKS
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.options import numbers

PLACE = Place("LIBERO", ".venv-libero", "RLINF_EMBODIED_LIBERO", "experiments.setup.libero")
CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview", "birdview", "sideview")
CONTROL_MODE = "osc_pose"


@dataclass(frozen=True, slots=True)
class Options:
    """The defaults of env.options."""

    task: int = -1  # the number of the only task to run; -1: all of the suite
    settle_steps: int = 10  # steps at rest after a reset, which count for nothing
    rotate: int = 180  # degrees by which the policy's images are turned: 180 as OpenVLA's, 0 upside down as MuJoCo's
    train_on_benchmark: int = 0  # 1: training, too, starts from the benchmark's initial states
    processes: int = 0  # of this worker, each with a share of its rows; 0: one; on a GPU one per core
    spare_scenes: int = 2  # of each process, kept for episodes of tasks that no row is running
    timeout_s: int = 600  # how long a process may take to answer; building a scene takes seconds


def read_options(config: EnvConfig) -> Options:
    """Returns the options of a config.

    Raises:
        ConfigError: an unknown option, or a value that cannot be used.
    """
    defaults = {field.name: field.default for field in fields(Options)}
    for name in config.options:
        if name not in defaults:
            close = difflib.get_close_matches(name, list(defaults), n=1)
            meant = f"did you mean {close[0]}?" if close else f"use one of {', '.join(defaults)}"
            raise ConfigError(f"env.options.{name} is not known to LIBERO: {meant}")
    options = Options(**{name: int(value) for name, value in numbers(config.options, "env.options").items()})
    _require(config.task in NUM_TASKS, "env.task", config.task, "it is a suite of LIBERO's", f"{', '.join(NUM_TASKS)}")
    last = NUM_TASKS[config.task] - 1
    _require(-1 <= options.task <= last, "env.options.task", options.task, f"{config.task} has tasks 0 to {last}", "-1")
    _require(options.rotate in (0, 180), "env.options.rotate", options.rotate, "degrees are 0 or 180", "180")
    _require(options.settle_steps >= 0, "env.options.settle_steps", options.settle_steps, "it is not negative", "10")
    _require(options.processes >= 0, "env.options.processes", options.processes, "it is not negative", "0")
    _require(options.spare_scenes >= 0, "env.options.spare_scenes", options.spare_scenes, "it is not negative", "2")
    _require(options.timeout_s > 0, "env.options.timeout_s", options.timeout_s, "it is positive", "600")
    _require(config.reward is Reward.sparse, "env.reward", config.reward.value, "LIBERO rewards success only", "sparse")
    _require(
        config.control_mode == CONTROL_MODE, "env.control_mode", config.control_mode, "it is LIBERO's", CONTROL_MODE
    )
    for camera in config.cameras:
        _require(camera in CAMERAS, "env.cameras", camera, "LIBERO's scenes have other cameras", ", ".join(CAMERAS))
    return options


def _require(holds: bool, path: str, value: object, rule: str, use: str) -> None:
    if not holds:
        raise ConfigError(f"{path} is {value!r}: {rule}; use {use}")
