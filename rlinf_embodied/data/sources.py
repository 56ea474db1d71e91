"""The problems that a config names."""

from __future__ import annotations

from typing import cast

from rlinf_embodied.config import DataConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.files import FileProblems
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import ProblemSource
from rlinf_embodied.plug_ins import load_plug_in


def problem_source(config: DataConfig, seed: int) -> ProblemSource:
    """Returns the streams of a config; `seed` decides what is drawn, or in which order files are gone through.

    Raises:
        ConfigError: there is no such level, or data._target_ makes no source.
        DataError: a file cannot be used.
    """
    if config._target_ is None:
        return FileProblems(config, seed) if config.files else GeneratedProblems(config.level, seed)
    found = load_plug_in(config._target_, "data._target_", "data", "seed")(config, seed)
    rule, kind = "it returns no source of problems", type(found).__name__
    action = "return an object with the methods size and batch of ProblemSource (rlinf_embodied/data/problems.py)"
    require(isinstance(found, ProblemSource), "data._target_", f"{config._target_} -> {kind}", rule, action)
    return cast(ProblemSource, found)
