"""What env.options may hold for MetaWorld, and what else of the section env it cannot do."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

from envs.foreign.place import Place
from envs.metaworld.tasks import INSTRUCTIONS, SUITES
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.options import typed

PLACE = Place("MetaWorld", ".venv-metaworld", "RLINF_EMBODIED_METAWORLD", "experiments.setup.metaworld")
CAMERAS = ("corner", "corner2", "corner3", "corner4", "topview", "gripperPOV", "behindGripper")
CONTROL_MODE = "xyz_delta"
MOST_STEPS = 500  # of an episode, as MetaWorld has it: it refuses further ones


class Pictures(StrEnum):
    """How images are drawn."""

    light = "light"  # without shadows, reflections and smoothed edges
    benchmark = "benchmark"  # as MetaWorld draws them


@dataclass(kw_only=True, slots=True)
class MetaworldOptions:
    """The defaults of env.options."""

    pictures: Pictures = Pictures.light
    processes: int = 0  # of this worker, each with a share of its rows; 0: one; on a GPU one per core
    spare_scenes: int = 20  # of each process, kept for episodes of tasks that no row is running
    timeout_s: int = 600  # how long a process may take to answer

    def __post_init__(self) -> None:
        for name, use in (("processes", 0), ("spare_scenes", 20)):
            value = getattr(self, name)
            require(value >= 0, f"env.options.{name}", value, "it is not negative", f"use {use}")
        require(self.timeout_s > 0, "env.options.timeout_s", self.timeout_s, "it is positive", "use 600")


def read_options(config: EnvConfig) -> MetaworldOptions:
    """Returns the options of a config.

    Raises:
        ConfigError: an unknown task or option, or a camera, control mode or length of episodes that MetaWorld does not
            have.
    """
    options = typed(config.options, MetaworldOptions, "env.options")
    known = (*SUITES, *INSTRUCTIONS)
    close = difflib.get_close_matches(config.task, known, n=3, cutoff=0.5)
    use = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(known[:8])}, ..."
    require(config.task in known, "env.task", config.task, "MetaWorld has no such task or suite", use)
    require(
        config.horizon <= MOST_STEPS,
        "env.horizon",
        config.horizon,
        f"MetaWorld's episodes have at most {MOST_STEPS} steps",
        f"use {MOST_STEPS // config.chunk * config.chunk} or less",
    )
    for camera in config.cameras:
        rule = "MetaWorld's scenes have other cameras"
        require(camera in CAMERAS, "env.cameras", camera, rule, f"use {', '.join(CAMERAS)}")
    rule = "MetaWorld moves the hand along x, y and z, and the fingers"
    require(config.control_mode == CONTROL_MODE, "env.control_mode", config.control_mode, rule, f"use {CONTROL_MODE}")
    return options
